// What is wrong with each run.

const FOLDED = 4; // From so many runs on, the verdicts of each are folded.
const STATES = { running: 'Running.', stopped: 'Stopped before its last step.', unknown: 'How it ended is not recorded.' };
const LEVELS = { problem: 'Problem', warning: 'Warning', note: 'Note' };

function verdictSection(app) {
  const many = app.data.runs.length > 1;
  const parts = app.data.runs.map((run, number) => {
    const cards = run.verdicts.map((verdict) => verdictCard(app, number, verdict));
    if (!many) return [run.verdicts.length ? null : healthBanner(run), ...cards];
    const title = [el('i', { class: 'key', style: { background: runColor(number) } }), ` ${run.label}`];
    if (!cards.length) return [el('h3', { class: 'run-title' }, title), healthBanner(run)];
    const open = app.data.runs.length < FOLDED;
    return [el('details', { class: 'group', open }, el('summary', {}, title, el('span', { class: 'count', text: run.verdicts.map((verdict) => verdict.title).join('; ') })), cards)];
  });
  return section('verdicts', 'Verdicts', null, ...parts.flat());
}

function healthBanner(run) {
  const bad = run.verdicts.filter((verdict) => verdict.level !== 'note');
  if (!run.steps_done && !Object.keys(run.metrics).length) return el('p', { class: 'banner quiet' }, 'No step is recorded yet.');
  if (!bad.length && run.state !== 'finished') return el('p', { class: 'banner quiet' }, el('b', { text: `${STATES[run.state]} ` }), 'No check has found anything wrong so far.');
  if (!bad.length) return el('p', { class: 'banner good' }, el('b', { text: 'Healthy. ' }), 'No check found anything wrong with this run.');
  const worst = bad.some((verdict) => verdict.level === 'problem') ? 'bad' : 'warn';
  const what = bad.length === 1 ? 'One thing needs' : `${bad.length} things need`;
  return el('p', { class: `banner ${worst}` }, el('b', { text: `${what} attention. ` }), bad.map((verdict) => verdict.title).join('; '), '. ', el('a', { href: '#verdicts', text: 'Why, and what to try' }));
}

function verdictCard(app, number, verdict) {
  const run = app.data.runs[number];
  const plots = verdict.evidence.filter((name, i) => plottable(run.metrics[name], i === 0)).slice(0, 3);
  const span = verdict.until === null ? `since step ${verdict.since}` : `steps ${verdict.since} to ${verdict.until}`;
  return el(
    'article',
    { class: `verdict ${verdict.level}`, 'data-verdict': verdict.name },
    el(
      'header',
      {},
      el('span', { class: `chip ${verdict.level}`, text: LEVELS[verdict.level] }),
      el('h4', { text: verdict.title }),
      el('button', { class: 'link', text: span, title: 'Show the samples of this step', onclick: () => app.showStep(number, verdict.since) }),
    ),
    el('p', {}, marked(verdict.summary)),
    el('div', { class: 'evidence' }, plots.map((name) => evidence(app, number, name, verdict))),
    verdict.remedies.length ? el('div', { class: 'remedies' }, el('h5', { text: 'What to try' }), verdict.remedies.map(remedy)) : null,
  );
}

// A flat line shows nothing, unless it is what the verdict is about.
function plottable(points, main) {
  if (!points || points.steps.length < 2) return false;
  return main || points.values.some((value) => value !== points.values[0]);
}

function evidence(app, number, name, verdict) {
  const run = app.data.runs[number];
  const series = [{ name, color: runColor(number), ...run.metrics[name] }];
  return el(
    'figure',
    {},
    el('figcaption', {}, el('code', { text: name })),
    lineChart({ series, since: verdict.since, until: verdict.until, level: verdict.level, height: 110, onStep: (step) => app.showStep(number, step) }),
  );
}

function remedy(one) {
  return el('div', { class: 'remedy' }, el('span', {}, marked(one.text)), one.spec ? el('pre', { text: one.spec }) : null);
}
