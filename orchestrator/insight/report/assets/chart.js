// Line charts in SVG.

const STEPS = { name: 'step', tick: count, steps: true };

function range(values, log) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (!(high >= low)) return [0, 1];
  if (log) return high > low ? [low / (high / low) ** 0.06, high * (high / low) ** 0.06] : [low / 2, high * 2];
  if (high === low) {
    const pad = Math.abs(high) * 0.1 || 0.5;
    return [low - pad, high + pad];
  }
  const pad = (high - low) * 0.06;
  return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
}

// series: [{name, color, steps, values, xs, raw}]: `xs` are the places on another axis than the step, `raw` the values
// before smoothing; marks: [{x, text}]; since, until: the part that is shaded; at: the places that are labelled; log:
// a logarithmic scale, unless no value is above 0.
function lineChart({ height = 132, ...given }) {
  const box = el('div', { class: 'chart', style: { height: `${height}px` } });
  whenSeen(box, (width) => drawLines({ marks: [], since: null, until: null, level: '', onStep: null, axis: STEPS, at: null, log: false, ...given, width, height }));
  return box;
}

function positive(one) {
  const kept = one.values.map((value, i) => i).filter((i) => one.values[i] > 0);
  const pick = (values) => values && kept.map((i) => values[i]);
  return { ...one, steps: pick(one.steps), values: pick(one.values), xs: pick(one.xs), raw: pick(one.raw)?.map((value) => Math.max(value, Number.MIN_VALUE)) };
}

function drawLines({ series, marks, since, until, level, width, height, onStep, axis, at: labelled, log }) {
  const above = log ? series.map(positive).filter((one) => one.steps.length) : [];
  const scaled = above.length > 0;
  const known = (scaled ? above : series.filter((one) => one.steps.length)).map((one) => ({ ...one, xs: one.xs ?? one.steps }));
  const scale = scaled ? Math.log10 : (value) => value;
  const [low, high] = range(known.flatMap((one) => one.values), scaled);
  const from = Math.min(...known.map((one) => one.xs[0]));
  const to = Math.max(...known.map((one) => one.xs.at(-1)));
  const labels = (scaled ? logTicks : ticks)(low, high, height > 110 ? 4 : 3).filter((at) => at >= low && at <= high);
  const texts = tickTexts(labels);
  const edge = { left: 12 + 6.4 * Math.max(...texts.map((text) => text.length)), right: 10, top: 8, bottom: 20 };
  const x = (place) => edge.left + (to > from ? (place - from) / (to - from) : 0.5) * (width - edge.left - edge.right);
  const y = (value) => height - edge.bottom - ((scale(Math.min(high, Math.max(low, value))) - scale(low)) / (scale(high) - scale(low))) * (height - edge.top - edge.bottom);
  const root = svg('svg', { viewBox: `0 0 ${width} ${height}`, width, height, role: 'img' });
  root.append(svg('title', { text: known.map((one) => one.name).join(', ') }));
  if (since !== null && since <= to) {
    const start = x(Math.max(since, from));
    root.append(svg('rect', { class: `since ${level}`, x: start, y: edge.top, width: Math.max(2, x(until ?? to) - start), height: height - edge.top - edge.bottom }));
  }
  labels.forEach((at, i) => {
    root.append(svg('line', { class: 'grid', x1: edge.left, x2: width - edge.right, y1: y(at), y2: y(at) }));
    root.append(svg('text', { class: 'tick', x: edge.left - 6, y: y(at) + 3.5, 'text-anchor': 'end', text: texts[i] }));
  });
  drawPlaces(root, labelled ?? (axis.steps ? stepTicks : ticks)(from, to, Math.max(2, width / 90)), { x, axis, width, height });
  for (const mark of marks) {
    if (mark.x < from || mark.x > to) continue;
    root.append(svg('line', { class: 'mark', x1: x(mark.x), x2: x(mark.x), y1: edge.top, y2: height - edge.bottom }, svg('title', { text: mark.text })));
  }
  for (const one of known) drawLine(root, one, x, y);
  follow(root, known, { x, y, from, to, edge, width, height, onStep, axis });
  return root;
}

// The labels below the chart; one at its edge ends there.
function drawPlaces(root, places, { x, axis, width, height }) {
  tickTexts(places, axis.tick).forEach((text, i) => {
    const reach = 3.2 * text.length;
    const middle = Math.max(reach, Math.min(width - reach - 1, x(places[i])));
    root.append(svg('text', { class: 'tick', x: middle, y: height - 6, 'text-anchor': 'middle', text }));
  });
}

function drawLine(root, one, x, y) {
  const line = (values, kind) => svg('polyline', { class: kind, points: values.map((value, i) => `${x(one.xs[i]).toFixed(1)},${y(value).toFixed(1)}`).join(' '), style: { stroke: one.color } });
  if (one.raw) root.append(line(one.raw, 'line raw'));
  root.append(line(one.values, 'line'));
  if (one.raw || one.steps.length > 40) return;
  for (let i = 0; i < one.steps.length; i += 1) {
    root.append(svg('circle', { class: 'dot', cx: x(one.xs[i]), cy: y(one.values[i]), r: 2.2, style: { fill: one.color } }));
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
  const placeAt = (event) => {
    const left = root.getBoundingClientRect().left;
    const share = (event.clientX - left - edge.left) / (width - edge.left - edge.right);
    return from + Math.max(0, Math.min(1, share)) * (to - from);
  };
  root.addEventListener('pointermove', (event) => {
    const wanted = placeAt(event);
    const lines = [];
    let place = 0;
    let head = '';
    series.forEach((one, i) => {
      const at = nearest(one.xs, wanted);
      place = one.xs[at];
      head = axis.steps ? `step ${count(one.steps[at])}` : axis.of ? `step ${count(one.steps[at])}, ${axis.tick(place)}` : `${axis.name} ${axis.tick(place)}`;
      spots[i].setAttribute('cx', x(place));
      spots[i].setAttribute('cy', y(one.values[at]));
      spots[i].setAttribute('visibility', 'visible');
      lines.push(el('div', {}, el('i', { class: 'key', style: { background: one.color } }), `${one.name}  ${short(one.values[at])}${one.raw ? ` (${short(one.raw[at])})` : ''}`));
    });
    cross.setAttribute('x1', x(place));
    cross.setAttribute('x2', x(place));
    cross.setAttribute('visibility', 'visible');
    tip([`${head}${onStep ? ' (click: its samples)' : ''}`, ...lines], event);
  });
  root.addEventListener('pointerleave', () => {
    for (const node of [cross, ...spots]) node.setAttribute('visibility', 'hidden');
    tip(null);
  });
  if (!onStep) return;
  root.classList.add('clickable');
  root.addEventListener('click', (event) => onStep(series[0].steps[nearest(series[0].xs, placeAt(event))]));
}
