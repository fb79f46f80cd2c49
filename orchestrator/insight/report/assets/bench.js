// The page of a benchmark: the fastest point and the bottleneck of each, plots over the swept fields, and every number.

const record = JSON.parse(document.getElementById('data').textContent);
const measured = record.points.map((point, number) => ({ ...point, number })).filter((point) => point.measures);

const name = (point) => point.label || record.name;
// The values alone: in a row of bars there is no room for the fields, which the caption names.
const values = (point) => record.fields.map((field) => String(point.settings[field])).join(' · ') || record.name;
const fields = record.fields.map((field) => field.split('.').pop()).join(' · ');
const speed = (value) => `${short(value)} tok/s`;

function section(id, title, ...parts) {
  return el('section', { id, 'data-title': title }, el('div', { class: 'head' }, el('h2', { text: title })), ...parts);
}

function card(title, value, ...parts) {
  return el('figure', { class: 'card' }, el('figcaption', {}, el('b', { text: title }), el('span', { class: 'value', text: value ?? '' })), ...parts);
}

// The first columns are names, the others numbers.
function table(heads, rows, names = record.fields.length) {
  const line = (tag, cells) => el('tr', {}, cells.map((cell, i) => el(tag, { class: i < names ? 'nowrap' : 'num nowrap', 'data-head': heads[i], text: cell })));
  return el('div', { class: 'scroll' }, el('table', { class: 'stack' }, el('thead', {}, line('th', heads)), el('tbody', {}, rows.map((cells) => line('td', cells)))));
}

// rows: [{label, parts: [{value, color}], text}].
function bars(rows, most) {
  return el('div', { class: 'bars' }, rows.map(({ label, parts, text }) => el(
    'div', { class: 'bar-row wide' },
    el('span', { class: 'who', text: label, title: label }),
    el('div', { class: 'both' }, parts.map(({ value, color }) => el('div', { class: parts.length > 1 ? 'bar half' : 'bar' }, el('i', { style: { width: `${(100 * value) / (most || 1)}%`, background: color } })))),
    el('span', { class: 'much', text }),
  )));
}

function legend(...entries) {
  return el('div', { class: 'legend' }, entries.map(([text, color]) => el('span', {}, el('i', { class: 'key', style: { background: color } }), text)));
}

function fastestSection() {
  if (record.best === null) return section('fastest', 'Fastest', el('p', { class: 'banner bad', text: 'No point could be measured.' }));
  const best = record.points[record.best];
  const { measures } = best;
  const settings = Object.entries(best.settings).map(([field, value]) => `${field}: ${JSON.stringify(value)}`).join('\n');
  return section(
    'fastest', 'Fastest',
    el('p', { class: 'banner good' }, el('b', { text: `${speed(measures.tokens_per_s)} ` }), `with ${best.workers} ${best.workers === 1 ? 'engine' : 'engines'}.`),
    settings ? el('pre', { text: settings }) : null,
  );
}

function boundSection() {
  return section('bounds', 'Bottlenecks', ...record.points.map((point) => {
    if (!point.bound) return el('article', { class: 'verdict problem' }, el('header', {}, el('span', { class: 'chip problem', text: 'not measured' }), el('h4', { text: name(point) })), el('p', { text: visible(point.problem) }));
    const { kind, why, lines, note } = point.bound;
    return el(
      'article', { class: `verdict ${lines.length ? 'warning' : 'note'}` },
      el('header', {}, el('span', { class: `chip ${lines.length ? 'warning' : 'note'}`, text: kind }), el('h4', { text: name(point) }), el('span', { class: 'value', text: speed(point.measures.tokens_per_s) })),
      el('p', { text: `${why[0].toUpperCase()}${why.slice(1)}.` }),
      lines.length ? el('div', { class: 'remedy' }, el('pre', { text: lines.join('\n') })) : null,
      note ? el('p', { text: `${note[0].toUpperCase()}${note.slice(1)}.` }) : null,
    );
  }));
}

// One plot for each numeric field: throughput over its values, a line for each combination of the others.
function curves() {
  return record.fields.map((field) => {
    if (!measured.every((point) => Number.isFinite(point.settings[field]))) return null;
    const lines = new Map();
    for (const point of measured) {
      const others = record.fields.filter((one) => one !== field).map((one) => `${one.split('.').pop()} ${point.settings[one]}`).join(', ');
      lines.set(others, [...(lines.get(others) ?? []), point]);
    }
    const series = [...lines].map(([others, points], i) => {
      const sorted = points.toSorted((a, b) => a.settings[field] - b.settings[field]);
      return { name: others || 'tokens/s', color: runColor(i), steps: sorted.map((point) => point.settings[field]), values: sorted.map((point) => point.measures.tokens_per_s) };
    });
    if (!series.some((one) => one.steps.length > 1)) return null;
    const labelled = [...new Set(measured.map((point) => point.settings[field]))].sort((a, b) => a - b);
    return card(field, 'tokens/s', lineChart({ series, height: 220, axis: { name: field.split('.').pop(), tick: short }, at: labelled }), series.length > 1 ? legend(...series.map((one) => [one.name, one.color])) : null);
  }).filter(Boolean);
}

function throughputSection() {
  const most = Math.max(...measured.map((point) => point.measures.tokens_per_s));
  const rows = measured.map(({ measures, ...point }) => ({
    label: values(point),
    parts: [{ value: measures.tokens_per_s, color: runColor(0) }],
    text: short(measures.tokens_per_s),
  }));
  return section('throughput', 'Throughput', el('div', { class: 'split' }, card('Sampled tokens per second', fields, bars(rows, most)), ...curves()));
}

function spreadCard(title, key) {
  const most = Math.max(...measured.map((point) => point.measures[key].p99));
  const rows = measured.map((point) => {
    const { p50, p99 } = point.measures[key];
    return { label: values(point), parts: [{ value: p50, color: runColor(0) }, { value: p99, color: runColor(1) }], text: `${seconds(p50)} / ${seconds(p99)}` };
  });
  return card(title, fields, bars(rows, most), legend(['median', runColor(0)], ['99th percentile', runColor(1)]));
}

function timeCard() {
  const rows = measured.map((point) => {
    const { busy, prefill_share: prefill } = point.measures;
    return el(
      'div', { class: 'bar-row wide' }, el('span', { class: 'who', text: values(point), title: name(point) }),
      el('div', { class: 'bar' }, [[busy * prefill, runColor(1)], [busy * (1 - prefill), runColor(0)]].map(([share, color]) => el('i', { style: { width: `${100 * share}%`, background: color } }))),
      el('span', { class: 'much', text: `${percent(busy)} busy` }),
    );
  });
  return card("The engines' time", fields, el('div', { class: 'bars' }, rows), legend(['prefill', runColor(1)], ['decode', runColor(0)], ['idle', 'var(--sunk)']));
}

function sharesCard() {
  const rows = measured.map((point) => {
    const { most_kv_use: kv, cached } = point.measures;
    return { label: values(point), parts: [{ value: kv, color: runColor(3) }, { value: cached, color: runColor(2) }], text: `${percent(kv)} / ${percent(cached)}` };
  });
  return card('Caches', fields, bars(rows, 1), legend(['KV cache in use, at most', runColor(3)], ['prompt tokens in the prefix cache', runColor(2)]));
}

function engineCard() {
  const rows = measured.flatMap((point) => point.measures.engines.map((engine) => ({
    label: point.label ? `${values(point)}: ${engine.engine}` : engine.engine, parts: [{ value: engine.tokens_per_s, color: runColor(4) }], text: `${short(engine.tokens_per_s)} (${percent(engine.busy)})`,
  })));
  return card('Engines', 'tokens/s (busy)', bars(rows, Math.max(...measured.flatMap((point) => point.measures.engines.map((engine) => engine.tokens_per_s)))));
}

function timeSection() {
  return section('time', 'Time and caches', el('div', { class: 'split' }, spreadCard('Latency of a sequence', 'latency_s'), spreadCard('Time to the first token', 'first_token_s'), spreadCard('Queued in the engine', 'queued_s'), timeCard(), sharesCard(), engineCard()));
}

// Two tables: all columns side by side are wider than a page.
const SPEEDS = [
  ['tok/s', (m) => short(m.tokens_per_s)], ['range', (m) => `${short(m.slowest_batch)} to ${short(m.fastest_batch)}`], ['per engine', (m) => short(m.per_engine)], ['per GPU', (m) => (m.per_gpu === null ? '' : short(m.per_gpu))],
  ['prefill tok/s', (m) => short(m.prefill_per_s)], ['decode tok/s', (m) => short(m.decode_per_s)],
];
const LOADS = [
  ['sequences', (m) => count(m.sequences)], ['prompt', (m) => short(m.prompt_tokens)], ['response', (m) => short(m.response_tokens)],
  ['running', (m) => short(m.running)], ['at most', (m) => count(m.most_running)], ['waiting', (m) => short(m.waiting)], ['preempted', (m) => count(m.preemptions)], ['KV mean', (m) => percent(m.kv_use)], ['KV max', (m) => percent(m.most_kv_use)],
];

function numbers(all) {
  const columns = all.filter(([, text]) => measured.some((point) => text(point.measures) !== ''));
  const rows = record.points.map((point) => [...record.fields.map((field) => String(point.settings[field])), ...columns.map(([, text]) => (point.measures ? text(point.measures) : '–'))]);
  return table([...record.fields.map((field) => field.split('.').pop()), ...columns.map(([head]) => head)], rows);
}

function numberSection() {
  return section('numbers', 'Numbers', numbers(SPEEDS), numbers(LOADS));
}

const gib = (bytes) => `${(bytes / 2 ** 30).toFixed(2)} GiB`;

function trainSection({ problem, trainers, ...train }) {
  if (problem) return section('training', 'Training alone', el('p', { class: 'banner bad', text: `Not measured: ${visible(problem)}` }));
  const heads = ['trainer', 'workers', 'tok/s', 'MFU', 'padding', 'peak memory', 'peak on the GPU'];
  const rows = trainers.map((one) => [
    one.role, count(one.workers), short(one.tokens_per_s), one.mfu === null ? '' : percent(one.mfu), percent(one.padding), gib(one.host_bytes), one.gpu_bytes ? gib(one.gpu_bytes) : '',
  ]);
  const kept = heads.map((_, i) => i).filter((i) => rows.some((cells) => cells[i] !== ''));
  const pick = (cells) => kept.map((i) => cells[i]);
  return section(
    'training', 'Training alone',
    el('p', { class: 'banner good' }, el('b', { text: `${seconds(train.step_s)} ` }), `for the updates of a step: ${count(train.sequences)} sequences, ${count(train.tokens)} tokens.`),
    table(pick(heads), rows.map(pick), 1),
  );
}

function header() {
  const batches = measured[0]?.measures.batches;
  const facts = [record.model.split('/').pop(), record.device === 'cuda' ? 'GPU' : 'CPU', record.points.length > 1 ? `${count(record.points.length)} points` : '', batches ? `${batches} batches each` : ''];
  return el(
    'header', { class: 'top' }, el('div', { class: 'brand', text: 'Troupe' }),
    el('div', {}, el('h1', { text: `${record.name}: rollouts` }), el('p', { class: 'facts', text: facts.filter(Boolean).join('  ·  ') })),
  );
}

const sections = [fastestSection(), ...(measured.length ? [throughputSection(), timeSection()] : []), boundSection(), ...(record.train ? [trainSection(record.train)] : []), ...(measured.length ? [numberSection()] : [])];
const links = el('nav', { 'aria-label': 'Sections' }, sections.map((one) => el('a', { href: `#${one.id}`, text: one.dataset.title })));
document.getElementById('page').replaceChildren(header(), links, el('main', {}, sections));
document.documentElement.dataset.ready = 'true';
