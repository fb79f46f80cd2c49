// Line charts in SVG.

function ticks(low, high, wanted) {
  if (!(high > low)) return [low];
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= rough) * power;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return found;
}

function stepTicks(low, high, wanted) {
  return [...new Set(ticks(low, high, wanted).filter(Number.isInteger))];
}

function range(series) {
  let low = Infinity;
  let high = -Infinity;
  for (const one of series) for (const value of one.values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (!(high >= low)) return [0, 1];
  if (high === low) {
    const pad = Math.abs(high) * 0.1 || 0.5;
    return [low - pad, high + pad];
  }
  const pad = (high - low) * 0.06;
  return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
}

// series: [{name, color, steps, values}]; marks: [{step, text}]; since: shade from this step on; axis: what the steps
// are; at: the steps that are labelled.
function lineChart({ series, marks = [], since = null, until = null, level = '', height = 132, onStep = null, axis = 'step', at = null }) {
  const box = el('div', { class: 'chart', style: { height: `${height}px` } });
  whenSeen(box, (width) => drawLines({ series, marks, since, until, level, width, height, onStep, axis, at }));
  return box;
}

function drawLines({ series, marks, since, until, level, width, height, onStep, axis, at: labelled }) {
  const known = series.filter((one) => one.steps.length);
  const [low, high] = range(known);
  const from = Math.min(...known.map((one) => one.steps[0]));
  const to = Math.max(...known.map((one) => one.steps[one.steps.length - 1]));
  const labels = ticks(low, high, height > 110 ? 4 : 3).filter((at) => at >= low && at <= high);
  const edge = { left: 12 + 6.4 * Math.max(...labels.map((at) => short(at).length)), right: 10, top: 8, bottom: 20 };
  const x = (step) => edge.left + (to > from ? (step - from) / (to - from) : 0.5) * (width - edge.left - edge.right);
  const y = (value) => height - edge.bottom - ((value - low) / (high - low)) * (height - edge.top - edge.bottom);
  const root = svg('svg', { viewBox: `0 0 ${width} ${height}`, width, height, role: 'img' });
  root.append(svg('title', { text: known.map((one) => one.name).join(', ') }));
  if (since !== null && since <= to) {
    const start = x(Math.max(since, from));
    root.append(svg('rect', { class: `since ${level}`, x: start, y: edge.top, width: Math.max(2, x(until ?? to) - start), height: height - edge.top - edge.bottom }));
  }
  for (const at of labels) {
    root.append(svg('line', { class: 'grid', x1: edge.left, x2: width - edge.right, y1: y(at), y2: y(at) }));
    root.append(svg('text', { class: 'tick', x: edge.left - 6, y: y(at) + 3.5, 'text-anchor': 'end', text: short(at) }));
  }
  for (const at of labelled ?? stepTicks(from, to, Math.max(2, width / 90))) {
    root.append(svg('text', { class: 'tick', x: x(at), y: height - 6, 'text-anchor': 'middle', text: labelled ? short(at) : count(at) }));
  }
  for (const mark of marks) {
    if (mark.step < from || mark.step > to) continue;
    root.append(svg('line', { class: 'mark', x1: x(mark.step), x2: x(mark.step), y1: edge.top, y2: height - edge.bottom }, svg('title', { text: mark.text })));
  }
  for (const one of known) drawLine(root, one, x, y);
  follow(root, known, { x, y, from, to, edge, width, height, onStep, axis });
  return root;
}

function drawLine(root, one, x, y) {
  const points = one.steps.map((step, i) => `${x(step).toFixed(1)},${y(one.values[i]).toFixed(1)}`);
  root.append(svg('polyline', { class: 'line', points: points.join(' '), style: { stroke: one.color } }));
  if (one.steps.length > 40) return;
  for (let i = 0; i < one.steps.length; i += 1) {
    root.append(svg('circle', { class: 'dot', cx: x(one.steps[i]), cy: y(one.values[i]), r: 2.2, style: { fill: one.color } }));
  }
}

function nearest(steps, wanted) {
  let low = 0;
  let high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low > 0 && wanted - steps[low - 1] < steps[low] - wanted ? low - 1 : low;
}

function follow(root, series, { x, y, from, to, edge, width, height, onStep, axis }) {
  const cross = svg('line', { class: 'cross', y1: edge.top, y2: height - edge.bottom, visibility: 'hidden' });
  const spots = series.map((one) => svg('circle', { class: 'spot', r: 3.5, visibility: 'hidden', style: { fill: one.color } }));
  root.append(cross, ...spots);
  const stepAt = (event) => {
    const left = root.getBoundingClientRect().left;
    const share = (event.clientX - left - edge.left) / (width - edge.left - edge.right);
    return from + Math.max(0, Math.min(1, share)) * (to - from);
  };
  root.addEventListener('pointermove', (event) => {
    const wanted = stepAt(event);
    const lines = [];
    let step = 0;
    series.forEach((one, i) => {
      const at = nearest(one.steps, wanted);
      step = one.steps[at];
      spots[i].setAttribute('cx', x(step));
      spots[i].setAttribute('cy', y(one.values[at]));
      spots[i].setAttribute('visibility', 'visible');
      lines.push(el('div', {}, el('i', { class: 'key', style: { background: one.color } }), `${one.name}  ${short(one.values[at])}`));
    });
    cross.setAttribute('x1', x(step));
    cross.setAttribute('x2', x(step));
    cross.setAttribute('visibility', 'visible');
    tip([`${axis} ${axis === 'step' ? count(step) : short(step)}${onStep ? ' (click: its samples)' : ''}`, ...lines], event);
  });
  root.addEventListener('pointerleave', () => {
    for (const node of [cross, ...spots]) node.setAttribute('visibility', 'hidden');
    tip(null);
  });
  if (!onStep) return;
  root.classList.add('clickable');
  root.addEventListener('click', (event) => onStep(series[0].steps[nearest(series[0].steps, stepAt(event))]));
}
