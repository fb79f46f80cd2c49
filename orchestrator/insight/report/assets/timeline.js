// Where the time of a step goes, and who waits.

function timelineSection(app) {
  const parts = app.data.runs.map((run, number) => timelineOf(app, run, number)).filter(Boolean);
  return parts.length ? section('timeline', 'Timeline', null, ...parts) : null;
}

function timelineOf(app, run, number) {
  const line = app.data.timeline[number];
  if (!line.phases.length) return null;
  const title = app.data.runs.length > 1 ? el('h3', { class: 'run-title' }, el('i', { class: 'key', style: { background: runColor(number) } }), run.label) : null;
  return el('div', {}, title, el('div', { class: 'split' }, phaseCard(app, run, number, line), bubbleCard(line)), spansCard(app, number, line));
}

const bound = (one) => Math.max(one.R, one.T);
const sum = (rows, of) => rows.reduce((total, row) => total + of(row), 0);

// Where spans are recorded they say what the engines and the trainers did; the controller's phases only what it waited for.
const timesOf = (line) => (line.times.length ? line.times : line.phases);

function phaseCard(app, run, number, line) {
  const { phases } = line;
  const times = new Map(timesOf(line).map((one) => [one.step, one]));
  const names = Object.keys(phases[0].phases).filter((name) => phases.some((one) => one.phases[name] > 0));
  const box = el('div', { class: 'chart', style: { height: '190px' } });
  whenSeen(box, (width) => drawPhases({ phases, times, names, width, height: 190, onStep: (step) => app.showTimeline(number, step) }));
  const spent = sum(timesOf(line), (one) => one.seconds);
  const least = sum(timesOf(line), bound);
  const slack = run.staleness ? 'the rest is waiting' : 'with max_staleness 1 the two overlap';
  return el(
    'figure',
    { class: 'card' },
    el('figcaption', {}, el('b', { text: 'Seconds of each step, by phase of the controller' })),
    box,
    el('div', { class: 'legend' }, names.map((name) => el('span', {}, el('i', { class: 'key', style: { background: phaseColor(name) } }), name)), el('span', {}, el('i', { class: 'key dash' }), 'bound max(R, T)')),
    el('p', { class: 'healthy', text: `R: time of the busiest engine; T: time of the busiest trainer. All steps: ${seconds(spent)}; bound ${seconds(least)} (${percent(least / spent)}); ${slack}.` }),
  );
}

function drawPhases({ phases, times, names, width, height, onStep }) {
  const edge = { left: 44, right: 8, top: 8, bottom: 20 };
  const shown = phases.length > width ? phases.filter((_, i) => i % Math.ceil(phases.length / width) === 0) : phases;
  const sorted = shown.map((one) => one.seconds).sort((a, b) => a - b);
  // One slow step, such as the first, must not flatten all others.
  const high = Math.min(sorted.at(-1), 3 * sorted[sorted.length >> 1]) * 1.05 || 1;
  const wide = (width - edge.left - edge.right) / shown.length;
  const y = (value) => height - edge.bottom - (Math.min(value, high) / high) * (height - edge.top - edge.bottom);
  const root = svg('svg', { viewBox: `0 0 ${width} ${height}`, width, height, role: 'img', class: 'clickable' }, svg('title', { text: 'seconds by phase' }));
  const levels = ticks(0, high, 4);
  const texts = tickTexts(levels);
  levels.forEach((at, i) => {
    root.append(svg('line', { class: 'grid', x1: edge.left, x2: width - edge.right, y1: y(at), y2: y(at) }));
    root.append(svg('text', { class: 'tick', x: edge.left - 6, y: y(at) + 3.5, 'text-anchor': 'end', text: `${texts[i]} s` }));
  });
  shown.forEach((one, i) => {
    const x = edge.left + i * wide;
    const gap = Math.min(2, wide * 0.15);
    let level = 0;
    const bar = svg('g', {});
    for (const name of names) {
      const top = y(level + one.phases[name]);
      bar.append(svg('rect', { x: x + gap / 2, width: Math.max(0.5, wide - gap), y: top, height: Math.max(0, y(level) - top), style: { fill: phaseColor(name) } }));
      level += one.phases[name];
    }
    const time = times.get(one.step);
    if (time) bar.append(svg('line', { class: 'bound', x1: x, x2: x + wide, y1: y(bound(time)), y2: y(bound(time)) }));
    bar.addEventListener('pointermove', (event) => tip([`step ${one.step}: ${seconds(one.seconds)}`, ...names.map((name) => `${name} ${seconds(one.phases[name])}`), ...(time ? [`R ${seconds(time.R)}, T ${seconds(time.T)}`] : [])], event));
    bar.addEventListener('pointerleave', () => tip(null));
    bar.addEventListener('click', () => onStep(one.step));
    root.append(bar);
  });
  const first = shown[0].step;
  const last = shown.at(-1).step;
  for (const at of stepTicks(first, last, Math.max(2, width / 90))) {
    const place = last > first ? ((at - first) / (last - first)) * (shown.length - 1) + 0.5 : 0.5;
    root.append(svg('text', { class: 'tick', x: edge.left + place * wide, y: height - 6, 'text-anchor': 'middle', text: count(at) }));
  }
  return root;
}

// Idle time of every role, over all steps.
function bubbleCard(line) {
  if (!line.times.length) return el('figure', { class: 'card' }, el('figcaption', {}, el('b', { text: 'Idle time by role' })), el('p', { class: 'empty', text: 'No spans are recorded for this run: the chart shows the phases of the controller only.' }));
  const roles = [...new Set(line.times.flatMap((one) => Object.keys(one.roles)))];
  const total = sum(line.times, (one) => one.seconds);
  const rows = roles.map((role) => {
    const idle = sum(line.times, (one) => one.roles[role]?.idle ?? one.seconds);
    const busy = {};
    for (const one of line.times) for (const [phase, spent] of Object.entries(one.roles[role]?.busy ?? {})) busy[phase] = (busy[phase] ?? 0) + spent;
    return { role, idle, busy, workers: Math.max(...line.times.map((one) => one.roles[role]?.workers ?? 0)) };
  });
  return el(
    'figure',
    { class: 'card' },
    el('figcaption', {}, el('b', { text: 'Who works and who waits' }), el('span', { class: 'value', text: `${seconds(total)} in all` })),
    el('div', { class: 'bars' }, rows.map((row) => bubbleRow(row, total))),
    el('p', { class: 'healthy', text: 'Mean over the workers of a role; hatched: a worker stands idle.' }),
  );
}

function bubbleRow({ role, idle, busy, workers }, total) {
  const bar = el('div', { class: 'bar' });
  for (const [phase, spent] of Object.entries(busy)) bar.append(el('i', { title: `${phase}: ${seconds(spent)}`, style: { width: `${(100 * spent) / total}%`, background: phaseColor(phase) } }));
  bar.append(el('i', { class: 'idle', title: `idle: ${seconds(idle)}`, style: { width: `${(100 * idle) / total}%` } }));
  return el('div', { class: 'bar-row' }, el('span', { class: 'who', text: `${role}${workers > 1 ? ` × ${workers}` : ''}` }), bar, el('span', { class: 'much', text: `idle ${percent(idle / total)}` }));
}

function spansCard(app, number, line) {
  if (!line.steps.length) return null;
  const holder = el('figure', { class: 'card', id: `spans-${number}` });
  const show = async (step) => {
    const at = nearest(line.steps, step);
    const wanted = line.steps[at];
    const block = line.blocks.find((one) => one.step === wanted) ?? (await app.fetchBlock('timeline', number, wanted)) ?? line.blocks[nearest(line.blocks.map((one) => one.step), wanted)];
    if (block) holder.replaceChildren(...spansView(block, line, show));
  };
  app.showSpans[number] = show;
  show(line.blocks.at(-1)?.step ?? line.steps.at(-1));
  return holder;
}

function spansView(block, line, show) {
  const near = (by) => {
    const known = line.blocks.length > 1 ? line.blocks.map((one) => one.step) : line.steps;
    return known[Math.max(0, Math.min(known.length - 1, nearest(known, block.step) + by))];
  };
  const box = el('div', { class: 'chart', style: { height: `${26 + 24 * block.lanes.length}px` } });
  whenSeen(box, (width) => drawSpans(block, width));
  const used = [...new Set(block.spans.map((span) => span[1]))];
  const { R, T, seconds: spent } = block.times;
  return [
    el('figcaption', {},
      el('b', { text: `Step ${block.step}, worker by worker` }),
      el('span', { class: 'buttons' }, el('button', { text: '‹', title: 'Earlier step', onclick: () => show(near(-1)) }), el('button', { text: '›', title: 'Later step', onclick: () => show(near(1)) })),
      el('span', { class: 'value', text: `${seconds(spent)}; R ${seconds(R)}, T ${seconds(T)}, bound ${seconds(Math.max(R, T))}` })),
    box,
    el('div', { class: 'legend' }, used.map((name) => el('span', {}, el('i', { class: 'key', style: { background: phaseColor(name) } }), name)), line.rule ? el('span', { text: line.rule }) : null),
  ];
}

function drawSpans(block, width) {
  const left = 92;
  const high = 24;
  const height = 26 + high * block.lanes.length;
  const end = Math.max(1000 * block.times.seconds, ...block.spans.map((span) => span[3]));
  const start = Math.min(0, ...block.spans.map((span) => span[2]));
  const x = (at) => left + ((at - start) / (end - start)) * (width - left - 8);
  const root = svg('svg', { viewBox: `0 0 ${width} ${height}`, width, height, role: 'img' }, svg('title', { text: `spans of step ${block.step}` }));
  const marks = ticks(start / 1000, end / 1000, Math.max(3, (width - left) / 100));
  const texts = tickTexts(marks);
  marks.forEach((at, i) => {
    root.append(svg('line', { class: 'grid', x1: x(1000 * at), x2: x(1000 * at), y1: 2, y2: height - 20 }));
    root.append(svg('text', { class: 'tick', x: Math.min(x(1000 * at), width - 16), y: height - 6, 'text-anchor': 'middle', text: `${texts[i]} s` }));
  });
  block.lanes.forEach(([, worker], lane) => {
    root.append(svg('rect', { class: 'lane', x: left, width: width - left - 8, y: lane * high + 4, height: high - 7, rx: 3 }));
    root.append(svg('text', { class: 'tick who', x: left - 8, y: lane * high + 16, 'text-anchor': 'end', text: worker }));
  });
  const bound = 1000 * Math.max(block.times.R, block.times.T);
  for (const [lane, phase, from, to, method, status, detail] of block.spans) {
    const bar = svg('rect', { class: status === 'ok' ? 'span' : 'span failed', x: x(from), width: Math.max(0.8, x(to) - x(from)), y: lane * high + 4, height: high - 7, rx: 2, style: { fill: phaseColor(phase) } });
    bar.addEventListener('pointermove', (event) => tip([`${block.lanes[lane][1]}: ${phase}${method ? ` (${method})` : ''}`, `${seconds((to - from) / 1000)}, from ${seconds(from / 1000)}`, ...(status === 'ok' ? [] : [status]), ...(detail ? [visible(detail)] : [])], event));
    bar.addEventListener('pointerleave', () => tip(null));
    root.append(bar);
  }
  root.append(svg('line', { class: 'bound', x1: x(bound), x2: x(bound), y1: 0, y2: height - 20 }, svg('title', { text: 'bound max(R, T)' })));
  return root;
}
