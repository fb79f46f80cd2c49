// Ledger, weight updates, memory, events and specs.

function ledgerSection(app) {
  const cards = app.data.runs.map((run) => ledgerCard(app, run)).filter(Boolean);
  return cards.length ? section('ledger', 'Ledger', null, el('div', { class: 'split' }, cards)) : null;
}

function ledgerCard(app, run) {
  const { counts, reasons } = run.ledger;
  if (!counts.dispatched) return null;
  const ends = [['trained', counts.trained, 'var(--good)'], ['in flight', counts.in_flight, 'var(--quiet)']];
  const named = Object.values(reasons).reduce((a, b) => a + b, 0);
  for (const [reason, samples] of Object.entries(reasons)) ends.push([`dropped: ${reason}`, samples, 'var(--bad)']);
  if (counts.dropped > named) ends.push(['dropped', counts.dropped - named, 'var(--bad)']);
  const box = el('div', { class: 'chart' });
  const shown = ends.filter(([, samples]) => samples > 0);
  whenSeen(box, (width) => drawFlow(counts, shown, width));
  return el(
    'figure',
    { class: 'card' },
    el('figcaption', {}, el('b', { text: titled(app, run, 'Every sample, accounted for') }), el('span', { class: 'value', text: `${count(counts.retries ?? 0)} groups retried` })),
    box,
    el('div', { class: 'legend flows' }, el('span', {}, el('i', { class: 'key', style: { background: 'var(--accent)' } }), `${count(counts.dispatched)} dispatched`), shown.map(([label, samples, color]) => el('span', {}, el('i', { class: 'key', style: { background: color } }), modelText('span', `${count(samples)} ${label} (${percent(samples / counts.dispatched)})`)))),
  );
}

// Titles name the run where there are several.
const titled = (app, run, text) => (app.data.runs.length > 1 ? `${text} (${run.label})` : text);

function drawFlow(counts, ends, width) {
  const height = Math.max(60, 26 * ends.length + 12);
  const root = svg('svg', { viewBox: `0 0 ${width} ${height}`, width, height, role: 'img' }, svg('title', { text: 'samples by what became of them' }));
  const total = counts.dispatched;
  const tall = height - 12;
  const from = 16;
  const to = width - 12;
  root.append(svg('rect', { class: 'source', x: 4, width: 12, y: 6, height: tall, rx: 3 }));
  let source = 6;
  const room = (tall - (ends.length - 1) * 10) / ends.length;
  ends.forEach(([, samples, color], i) => {
    const out = (samples / total) * tall;
    const own = Math.max(3, Math.min(room, out));
    const top = 6 + i * (room + 10) + (room - own) / 2;
    const middle = (from + to) / 2;
    const path = `M${from},${source} C${middle},${source} ${middle},${top} ${to},${top} L${to},${top + own} C${middle},${top + own} ${middle},${source + out} ${from},${source + out} Z`;
    root.append(svg('path', { class: 'stream', d: path, style: { fill: color } }));
    root.append(svg('rect', { x: to, width: 8, y: top, height: own, rx: 2, style: { fill: color } }));
    source += out;
  });
  return root;
}

function table(heads, rows, classes = []) {
  const cell = (tag, content, i) => el(tag, { class: classes[i], 'data-head': tag === 'td' && heads[i] }, content instanceof Node ? content : String(content));
  return el('div', { class: 'scroll' }, el('table', {}, el('thead', {}, el('tr', {}, heads.map((head, i) => cell('th', head, i)))), el('tbody', {}, rows.map((row) => el('tr', {}, row.map((content, i) => cell('td', content, i)))))));
}

// What the digests of the updates show; without digests (transport over IPC or NCCL) they show nothing.
function verified(updates) {
  const unequal = updates.filter((one) => one.equal === false).length;
  const without = updates.filter((one) => one.equal === null).length;
  const found = [unequal ? `${unequal} not equal` : '', without ? `${without} without digest` : ''].filter(Boolean);
  return found.join(', ') || `${updates.length}, all verified`;
}

// What every worker did when is a trace file for another viewer, which zooms and measures.
function timelineSection(app) {
  const recorded = app.data.runs.filter((run) => run.traced);
  if (!recorded.length) return null;
  const commands = recorded.map((run) => `troupe trace ${run.folder} -o trace.json`).join('\n');
  return section('timeline', 'Timeline', null, el('p', {}, 'Who was busy and who waited, and the file for ', el('a', { href: 'https://ui.perfetto.dev', text: 'ui.perfetto.dev' }), ':'), el('pre', { text: visible(commands) }));
}

function weightSection(app) {
  const parts = app.data.runs.map((run) => {
    if (!run.weights.length) return null;
    const rows = run.weights.toReversed().map((one) => [
      String(one.version ?? '–'), el('code', { text: one.digest.slice(0, 16) || '–' }), one.bytes ? `${short(one.bytes / 2 ** 20)} MiB` : '–', seconds(one.seconds),
      String(Object.keys(one.engines).length), one.equal === null ? 'no digest' : one.equal ? '✓ equal' : el('b', { class: 'failed', text: Object.entries(one.engines).filter(([, digest]) => digest !== one.digest).map(([engine]) => engine).join(', ') }),
    ]);
    return el('details', { class: 'group' }, el('summary', {}, titled(app, run, 'Weight updates'), el('span', { class: 'count', text: verified(run.weights) })), table(['version', 'digest', 'size', 'time', 'engines', 'what the engines hold'], rows, ['num', '', 'num', 'num', 'num']));
  });
  const found = parts.filter(Boolean);
  return found.length ? section('weights', 'Weights', null, ...found) : null;
}

const gib = (value) => (value === undefined ? '–' : value.toFixed(2));

function memorySection(app) {
  const cards = app.data.runs.map((run) => {
    const { peaks, planned, problem } = run.memory;
    const names = [...new Set([...Object.keys(planned), ...Object.keys(peaks)])];
    if (!names.length) return null;
    const most = Math.max(...names.map((name) => Math.max(peaks[name] ?? 0, planned[name] ?? 0)));
    const bar = (value, kind) => el('div', { class: `bar thin ${kind}` }, el('i', { style: { width: `${(100 * (value ?? 0)) / most}%` } }));
    return el(
      'figure',
      { class: 'card' },
      el('figcaption', {}, el('b', { text: titled(app, run, 'Peak memory of the largest worker') }), el('span', { class: 'legend' }, el('span', {}, el('i', { class: 'key peak' }), 'measured'), el('span', {}, el('i', { class: 'key planned' }), 'planned'))),
      el('div', { class: 'bars' }, names.map((name) => el('div', { class: 'bar-row' }, el('span', { class: 'who', text: name.replace('_gpu', ' (GPU)') }), el('div', { class: 'both' }, bar(peaks[name], 'peak'), bar(planned[name], 'planned')), el('span', { class: 'much', text: `${gib(peaks[name])} / ${gib(planned[name])} GiB` })))),
      problem ? el('p', { class: 'healthy', text: `Plan: ${problem}` }) : null,
    );
  });
  const found = cards.filter(Boolean);
  return found.length ? section('memory', 'Memory', null, el('div', { class: 'split' }, found)) : null;
}

function eventSection(app) {
  const many = app.data.runs.length > 1;
  const rows = app.data.runs.flatMap((run) => run.events.map(({ time, step, text }) => [
    time ? new Date(1000 * time).toISOString().slice(0, 19).replace('T', ' ') : '–', ...(many ? [modelText('span', run.label)] : []), String(step ?? '–'), modelText('span', text),
  ]));
  const heads = ['time (UTC)', ...(many ? ['run'] : []), 'step', 'event'];
  return rows.length ? section('events', 'Events', null, table(heads, rows, heads.map((head) => ({ step: 'num', event: 'wide' })[head] ?? 'nowrap'))) : null;
}

function specSection(app) {
  const parts = app.data.runs.filter((run) => run.spec).map((run) => el('details', { class: 'group' }, el('summary', { text: titled(app, run, 'spec.yaml, with every default') }), el('pre', { class: 'spec', text: visible(run.spec) })));
  return parts.length ? section('spec', 'Spec', null, ...parts) : null;
}
