// Results on the held-out sets, before and after training, with their confidence intervals.

function evaluationSection(app) {
  const parts = app.data.runs.filter((run) => run.evaluations.sets?.length).map((run) => evaluationCard(app, run));
  return parts.length ? section('evaluation', 'Evaluation', null, ...parts, el('p', { class: 'healthy', text: 'Brackets hold the 95% confidence interval over the choice of prompts. avg@k is the share of solved samples, pass@k the chance that one of k is solved, best@k the best reward of k, maj@k that the answer most of k give is right.' })) : null;
}

function evaluationCard(app, run) {
  const { first, last, sets } = run.evaluations;
  const both = first !== last;
  const heads = ['set', 'result', ...(both ? [first ? `step ${first}` : 'before training'] : []), `step ${last}`, ...(both ? ['change'] : []), ''];
  const rows = sets.flatMap((set) => [
    ...set.rows.map((row, i) => evaluationRow(row, i ? '' : setName(set), both)),
    ...set.parts.flatMap(({ part, rows: own }) => own.filter((row) => row.share || own.length === 1).map((row) => evaluationRow(row, el('span', { class: 'level', text: visible(part) }), both))),
  ]);
  const numbers = heads.map((_, i) => (i < 2 ? 'nowrap' : i < heads.length - 1 ? 'num nowrap' : 'interval'));
  return el('div', { class: 'evaluation' }, app.data.runs.length > 1 ? el('h3', {}, modelText('span', run.label)) : null, table(heads, rows, numbers));
}

function setName(set) {
  const how = [set.sampling, ...(set.environment ? [`environment ${set.environment}`] : []), set.rewards].join('; ');
  const lost = [set.refused ? `${count(set.refused)} refused` : '', set.failed ? `${count(set.failed)} samples failed` : ''].filter(Boolean).join(', ');
  return el('span', {}, el('b', { text: visible(set.label) }), el('small', { text: ` ${count(set.prompts)} prompts` }), el('br'), el('small', { text: visible(how) }), lost ? el('small', { class: 'failed', text: `; ${lost}` }) : null);
}

function evaluationRow(row, name, both) {
  const { first, last, share } = row;
  const change = first && last ? last.value - first.value : null;
  return [name, row.name.replace('_', ' '), ...(both ? [estimate(first)] : []), estimate(last), ...(both ? [change === null ? '–' : `${change >= 0 ? '+' : '−'}${figure(Math.abs(change))}`] : []), share && last ? intervals(both ? [first, last] : [last]) : ''];
}

const figure = (value) => (Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(3));
const estimate = (one) => (one ? `${figure(one.value)}${one.low === null ? '' : ` [${figure(one.low)}, ${figure(one.high)}]`}` : '–');

// Shares on an axis from 0 to 1: the value as a dot, its interval as a line; the evaluation before training above.
function intervals(shown) {
  const width = 180;
  const height = 8 * shown.length + 6;
  const x = (share) => 4 + (width - 8) * share;
  const root = svg('svg', { viewBox: `0 0 ${width} ${height}`, width, height, role: 'img', class: 'intervals' }, svg('title', { text: shown.map(estimate).join(' → ') }));
  for (const share of [0, 0.5, 1]) root.append(svg('line', { class: 'tick', x1: x(share), x2: x(share), y1: 0, y2: height }));
  shown.forEach((one, i) => {
    if (!one) return;
    const y = 7 + 8 * i;
    const kind = i === shown.length - 1 ? 'after' : 'before';
    if (one.low !== null) root.append(svg('line', { class: kind, x1: x(one.low), x2: x(one.high), y1: y, y2: y }));
    root.append(svg('circle', { class: kind, cx: x(one.value), cy: y, r: 3 }));
  });
  return root;
}
