// The settings of a sweep: means with intervals over the seeds, and the frontier of reward against KL.

const interval = ({ mean, low, high }) => (mean === null ? '–' : low === null ? short(mean) : `${short(mean)} (${short(low)} to ${short(high)})`);

function sweepSection(app) {
  const { sweep } = app.data;
  if (!sweep) return null;
  const rows = sweep.settings.map((one, number) => [
    el('span', { class: 'run-name' }, el('i', { class: 'key', style: { background: runColor(number) } }), el('code', { text: visible(one.label) })),
    `${one.trials.filter(({ status }) => status === 'complete').length} of ${one.trials.length}`, interval(one),
    [...new Set(one.trials.map(({ status }) => status))].join(', '),
  ]);
  const heads = ['setting', 'seeds', `${sweep.metric}, 95% interval`, 'status'];
  return section('sweep', 'Sweep', null, el('p', { class: 'healthy', text: visible(sweep.sentence) }), table(heads, rows, ['nowrap', 'num', 'num nowrap', 'nowrap']), frontierCard(sweep));
}

function frontierCard(sweep) {
  const known = sweep.settings.flatMap((one, number) => one.trials.map((trial) => ({ ...trial, color: runColor(number), label: one.label })));
  const points = known.filter(({ kl, reward }) => kl !== null && reward !== null);
  if (points.length < 2) return null;
  const box = el('div', { class: 'chart', style: { height: '220px' } });
  whenSeen(box, (width) => drawFrontier(points, sweep.frontier, width, 220));
  return el('figure', { class: 'card', id: 'frontier', style: { 'margin-top': '12px' } }, el('figcaption', {}, el('b', { text: 'Reward against KL to the reference, and the frontier' })), box);
}

function drawFrontier(points, frontier, width, height) {
  const [left, right] = range(points.map(({ kl }) => kl), false);
  const [low, high] = range(points.map(({ reward }) => reward), false);
  const labels = ticks(low, high, 4).filter((at) => at >= low && at <= high);
  const texts = tickTexts(labels);
  const edge = 12 + 6.4 * Math.max(...texts.map((text) => text.length));
  const x = (kl) => edge + ((kl - left) / (right - left)) * (width - edge - 10);
  const y = (reward) => height - 20 - ((reward - low) / (high - low)) * (height - 28);
  const root = svg('svg', { viewBox: `0 0 ${width} ${height}`, width, height, role: 'img' }, svg('title', { text: 'reward against KL' }));
  labels.forEach((at, i) => root.append(svg('line', { class: 'grid', x1: edge, x2: width - 10, y1: y(at), y2: y(at) }), svg('text', { class: 'tick', x: edge - 6, y: y(at) + 3.5, 'text-anchor': 'end', text: texts[i] })));
  drawPlaces(root, ticks(left, right, width / 90).filter((at) => at <= right), { x, axis: { tick: short }, width, height });
  root.append(svg('polyline', { class: 'line', points: frontier.map(([kl, reward]) => `${x(kl)},${y(reward)}`).join(' '), style: { stroke: 'var(--quiet)' } }));
  for (const { kl, reward, label, seed, color } of points) {
    root.append(svg('circle', { class: 'dot', cx: x(kl), cy: y(reward), r: 4, style: { fill: color } }, svg('title', { text: visible(`${label}, seed ${seed}: reward ${short(reward)}, KL ${short(kl)}`) })));
  }
  return root;
}
