// The table of several runs: what they reached, how fast, and in what they differ.

const COLUMNS = 3; // Fields that stand in the table; all of them are in the list below it.

function runSection(app) {
  const { runs, differences } = app.data;
  if (runs.length < 2) return null;
  const fields = differences.filter(({ field }) => field !== 'name' && !field.startsWith('output.'));
  const columns = fields.length > COLUMNS ? [] : fields;
  const measured = [...new Set(runs.map((run) => run.outcome.learned?.name).filter(Boolean))];
  const held = [...new Set(runs.map((run) => run.outcome.held_out?.name).filter(Boolean))];
  const heads = ['run', 'health', 'step', measured.join(', ') || 'reward', ...(held.length ? [held.join(', ')] : []), 'tokens/s', 'tokens', 'time', ...columns.map(({ field }) => el('code', { text: field.split('.').slice(-2).join('.'), title: field }))];
  const rows = runs.map((run, number) => [
    el('span', { class: 'run-name' }, el('i', { class: 'key', style: { background: runColor(number) } }), el('span', {}, modelText('b', run.label), el('small', { text: ` ${run.algorithm}` }))),
    health(run), `${count(run.steps_done)} of ${count(run.steps)}`, change(run.outcome.learned), ...(held.length ? [change(run.outcome.held_out)] : []),
    short(run.outcome.tokens_per_s), short(run.outcome.tokens || null), seconds(run.outcome.seconds || null),
    ...columns.map(({ values }) => el('code', { text: visible(values[number]) })),
  ]);
  const numbers = heads.map((_, i) => (i > 1 && i < heads.length - columns.length ? 'num nowrap' : 'nowrap'));
  return section('runs', 'Runs', null, table(heads, rows, numbers), differenceList(app, fields, columns));
}

const change = (one) => (one ? `${short(Number(one.first.toPrecision(3)))} → ${short(Number(one.last.toPrecision(3)))}` : '–');

function health(run) {
  const bad = run.verdicts.filter((verdict) => verdict.level !== 'note');
  if (!bad.length) return run.state === 'finished' ? el('span', { class: 'chip good', text: 'healthy' }) : el('span', { class: 'chip note', text: run.state });
  const level = bad.some((verdict) => verdict.level === 'problem') ? 'problem' : 'warning';
  return el('a', { class: `chip ${level}`, href: '#verdicts', text: bad.length === 1 ? bad[0].title : `${bad.length} findings`, title: bad.map((verdict) => verdict.title).join('; ') });
}

function differenceList(app, fields, columns) {
  const { runs } = app.data;
  if (!fields.length) return el('p', { class: 'empty', text: 'The specs are equal.' });
  if (columns.length) return null;
  const rows = fields.map(({ field, values }) => [el('code', { text: field }), ...values.map((value) => el('code', { text: visible(value) }))]);
  return el('details', { class: 'group', id: 'differences', open: fields.length <= 12 }, el('summary', {}, 'Fields in which the specs differ', el('span', { class: 'count', text: String(fields.length) })), table(['field', ...runs.map((run) => run.label)], rows));
}
