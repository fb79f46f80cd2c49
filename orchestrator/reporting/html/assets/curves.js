// Every metric, by section of the reference.

const OPEN = ['Rewards and groups', 'Updates of the policy', 'Prompts and responses', 'Offline objectives', 'Evaluation'];

function curveSection(app) {
  const state = app.state.curves;
  const holder = el('div', {});
  const draw = () => holder.replaceChildren(...app.data.sections.map((one) => curveGroup(app, one)).filter(Boolean));
  const search = el('input', {
    type: 'search', placeholder: 'Filter metrics, e.g. kl or reward', 'aria-label': 'Filter metrics', value: state.filter,
    oninput: debounce(120, (event) => { state.filter = event.target.value; draw(); }),
  });
  const smooth = el('label', { class: 'check' }, el('input', { type: 'checkbox', checked: state.smooth, onchange: (event) => { state.smooth = event.target.checked; draw(); } }), 'smooth');
  draw();
  return section('curves', 'Curves', el('div', { class: 'tools' }, search, smooth, legend(app)), holder);
}

function legend(app) {
  if (app.data.runs.length < 2) return null;
  return el('div', { class: 'legend' }, app.data.runs.map((run, number) => el('span', {}, el('i', { class: 'key', style: { background: runColor(number) } }), run.name)));
}

function curveGroup(app, group) {
  const { filter } = app.state.curves;
  const wanted = group.metrics.filter((metric) => metric.name.toLowerCase().includes(filter.trim().toLowerCase()));
  if (!wanted.length) return null;
  const moving = wanted.filter((metric) => !constant(app, metric.name));
  const still = wanted.filter((metric) => constant(app, metric.name));
  const opened = app.state.curves.open;
  const open = filter ? true : opened[group.title] ?? OPEN.includes(group.title);
  const details = el(
    'details',
    { class: 'group', open },
    el('summary', {}, group.title, el('span', { class: 'count', text: String(wanted.length) })),
    el('div', { class: 'cards' }, moving.map((metric) => curveCard(app, metric))),
    still.length ? el('p', { class: 'still' }, 'Constant: ', still.map((metric) => el('span', { title: metric.meaning }, el('code', { text: metric.name }), ` ${short(lastOf(app, metric.name))}`))) : null,
  );
  details.addEventListener('toggle', () => { if (!filter) opened[group.title] = details.open; });
  return details;
}

const seriesOf = (app, name) => app.data.runs.map((run, number) => ({ run, number, points: run.metrics[name] })).filter((one) => one.points?.steps.length);

function constant(app, name) {
  const values = seriesOf(app, name).flatMap((one) => one.points.values);
  return values.every((value) => value === values[0]);
}

const lastOf = (app, name) => seriesOf(app, name)[0]?.points.values.at(-1);

function smoothed(values) {
  const weight = 0.75;
  let state = values[0];
  return values.map((value) => (state = weight * state + (1 - weight) * value));
}

function curveCard(app, metric) {
  const found = seriesOf(app, metric.name);
  const smooth = app.state.curves.smooth;
  const series = found.map(({ run, number, points }) => ({ name: run.name, color: runColor(number), steps: points.steps, values: smooth ? smoothed(points.values) : points.values }));
  const marks = found.flatMap(({ run }) => run.resumes.map((step) => ({ step, text: `resumed after step ${step}` })));
  const unit = metric.unit === '-' ? '' : metric.unit;
  return el(
    'figure',
    { class: 'card', 'data-metric': metric.name },
    el('figcaption', { title: metric.meaning }, el('code', { text: metric.name }), el('span', { class: 'value' }, found.map(({ points }) => short(points.values.at(-1))).join(' / '), unit ? el('small', { text: ` ${unit}` }) : null)),
    lineChart({ series, marks, onStep: (step) => app.showStep(found[0].number, step) }),
    metric.healthy && metric.healthy !== '-' ? el('p', { class: 'healthy', title: metric.meaning, text: `healthy: ${metric.healthy.replaceAll('`', '')}` }) : null,
  );
}
