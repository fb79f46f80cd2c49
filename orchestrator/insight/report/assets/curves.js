// Curves: the few that say how a run goes, on the first screen, and every metric, by section of the reference.

const OPEN = ['Rewards and groups', 'Updates of the policy', 'Prompts and responses', 'Offline objectives', 'Evaluation'];

// One chart for each line: the first of its metrics that a run has and that changes.
const OVERVIEW = [
  ['reward/mean', 'policy/nll', 'policy/preference_loss', 'reward_model/preference_loss', 'policy/loss'],
  ['eval/accuracy', 'eval/reward', 'eval/loss'],
  ['policy/entropy', 'policy/accuracy', 'reward_model/accuracy'],
  ['policy/kl_exact', 'kl_ref', 'policy/kl_ref', 'policy/kl_old', 'policy/margin', 'reward_model/margin'],
  ['response_tokens/mean', 'policy/grad_norm', 'reward_model/grad_norm'],
  ['rollout/tokens_per_s', 'response_tokens_per_s', 'tokens_per_s'],
  ['critic/value_error', 'groups/mixed', 'policy/learning_rate'],
  ['seconds/step'],
];
const MOST_IN_OVERVIEW = 6;

// Units of the time axis: [seconds, name, largest number of them].
const TIMES = [[1, 's', 120], [60, 'min', 120], [3600, 'h', 1e9]];

// What x is: of a run that does not record it, there is no line.
function axisOf(app) {
  const chosen = app.state.curves.x;
  if (chosen === 'step') return STEPS;
  if (chosen === 'tokens') return { name: 'tokens', of: 'tokens', unit: 1, tick: (value, digits) => short(value, digits) };
  const longest = Math.max(0, ...app.data.runs.map((run) => run.used.seconds.values.at(-1) ?? 0));
  const [unit, name] = TIMES.find(([size, , most]) => longest / size <= most);
  return { name: 'time', of: 'seconds', unit, tick: (value, digits) => `${short(value, digits)} ${name}` };
}

// What was used up to a step; of a long run not every step is known.
function placeOf(used, step) {
  const { steps, values } = used;
  const near = nearest(steps, step);
  const other = steps[near] < step ? near + 1 : near - 1;
  if (steps[near] === step || !(other in steps)) return values[near];
  const share = (step - steps[near]) / (steps[other] - steps[near]);
  return values[near] + share * (values[other] - values[near]);
}

function places(run, steps, axis) {
  if (axis.steps) return steps;
  const used = run.used[axis.of];
  return used.steps.length ? steps.map((step) => placeOf(used, step) / axis.unit) : [];
}

// Controls of all curves; both sections have them.
function curveTools(app) {
  const state = app.state.curves;
  const set = (change) => { Object.assign(state, change); app.redrawCurves(); };
  const known = Object.keys(app.data.runs[0].used).filter((name) => app.data.runs.some((run) => run.used[name].steps.length));
  const entries = [['step', 'by step'], ['tokens', 'by tokens'], ['seconds', 'by time']].filter(([value]) => value === 'step' || known.includes(value));
  const smooth = el('input', { type: 'range', min: '0', max: '0.95', step: '0.05', class: 'smooth', 'aria-label': 'Smoothing', oninput: debounce(60, (event) => set({ smooth: Number(event.target.value) })) });
  const tools = el(
    'div',
    { class: 'curve-tools' },
    el('select', { class: 'x-axis', 'aria-label': 'Horizontal axis', onchange: (event) => set({ x: event.target.value }) }, entries.map(([value, text]) => el('option', { value, text }))),
    el('label', { class: 'check' }, el('input', { type: 'checkbox', class: 'log', onchange: (event) => set({ log: event.target.checked }) }), 'log scale'),
    el('label', { class: 'check' }, 'smoothing ', smooth),
  );
  showSettings(tools, state);
  return tools;
}

function showSettings(tools, state) {
  tools.querySelector('.x-axis').value = state.x;
  tools.querySelector('.log').checked = state.log;
  tools.querySelector('.smooth').value = state.smooth;
}

function overviewSection(app) {
  const holder = el('div', { class: 'cards overview' });
  const tools = curveTools(app);
  const draw = () => {
    showSettings(tools, app.state.curves);
    holder.replaceChildren(...overviewMetrics(app).map((metric) => curveCard(app, metric, { brief: true })));
  };
  app.redraws.overview = draw;
  draw();
  if (!holder.children.length) return null;
  return section('overview', 'Overview', el('div', { class: 'tools' }, tools, legend(app)), app.data.runs.length > 1 ? null : healthBanner(app.data.runs[0]), holder);
}

// Of each held-out set with a name, the result that says most.
function heldOutSets(metrics) {
  const rewards = [...metrics.keys()].filter((name) => /^eval\/[a-z0-9-]+\/reward$/.test(name));
  return rewards.map((name) => [name.replace(/reward$/, 'avg'), name]);
}

function overviewMetrics(app) {
  const metrics = new Map(app.data.sections.flatMap((one) => one.metrics.map((metric) => [metric.name, metric])));
  const lines = OVERVIEW.flatMap((line) => (line.includes('eval/accuracy') ? [line, ...heldOutSets(metrics)] : [line]));
  const names = lines.map((line) => line.find((name) => seriesOf(app, name).length && !constant(app, name))).filter(Boolean);
  return names.slice(0, MOST_IN_OVERVIEW).map((name) => metrics.get(name));
}

function curveSection(app) {
  const state = app.state.curves;
  const holder = el('div', {});
  const tools = curveTools(app);
  const sorted = app.data.sections.toSorted((a, b) => OPEN.includes(b.title) - OPEN.includes(a.title));
  const draw = () => {
    showSettings(tools, state);
    holder.replaceChildren(...sorted.map((one) => curveGroup(app, one)).filter(Boolean));
  };
  const search = el('input', {
    type: 'search', placeholder: 'Filter metrics, e.g. kl or reward', 'aria-label': 'Filter metrics', value: state.filter,
    oninput: debounce(120, (event) => { state.filter = event.target.value; draw(); }),
  });
  app.redraws.curves = draw;
  draw();
  return section('curves', 'Curves', el('div', { class: 'tools' }, search, tools, legend(app)), holder);
}

function legend(app) {
  if (app.data.runs.length < 2) return null;
  return el('div', { class: 'legend' }, app.data.runs.map((run, number) => el('span', {}, el('i', { class: 'key', style: { background: runColor(number) } }), run.label)));
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
    still.length ? el('p', { class: 'still' }, el('span', { text: 'Constant:' }), still.map((metric) => el('span', { title: metric.meaning }, el('code', { text: metric.name }), ` ${short(lastOf(app, metric.name))}`))) : null,
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

// An exponential moving average that starts at the first value without favouring it.
function smoothed(values, weight) {
  let state = 0;
  let total = 0;
  return values.map((value) => {
    state = weight * state + (1 - weight) * value;
    total = weight * total + 1 - weight;
    return state / total;
  });
}

function curveLine(app, { run, number, points }, axis) {
  const weight = app.state.curves.smooth;
  const xs = places(run, points.steps, axis);
  const steps = xs.length ? points.steps : [];
  return { name: run.label, color: runColor(number), steps, xs, values: weight ? smoothed(points.values, weight) : points.values, raw: weight ? points.values : null };
}

function resumptions(run, axis) {
  const xs = places(run, run.resumes, axis);
  return xs.map((x, i) => ({ x, text: `${run.label}: resumed after step ${run.resumes[i]}` }));
}

function curveCard(app, metric, { brief = false } = {}) {
  const found = seriesOf(app, metric.name);
  const axis = axisOf(app);
  const series = found.map((one) => curveLine(app, one, axis));
  const marks = found.flatMap(({ run }) => resumptions(run, axis));
  const unit = metric.unit === '-' ? '' : metric.unit;
  const lasts = found.map(({ number, points }) => el('span', {}, found.length > 1 ? el('i', { class: 'key', style: { background: runColor(number) } }) : null, short(points.values.at(-1))));
  const healthy = !brief && metric.healthy && metric.healthy !== '-';
  return el(
    'figure',
    { class: 'card', [brief ? 'data-overview' : 'data-metric']: metric.name },
    el('figcaption', { title: metric.meaning }, el('code', { text: metric.name }), el('span', { class: 'value' }, lasts, unit ? el('small', { text: unit }) : null)),
    series.some((one) => one.steps.length) ? lineChart({ series, marks, axis, log: app.state.curves.log, height: brief ? 150 : 132, onStep: (step) => app.showStep(found[0].number, step) }) : el('p', { class: 'empty', text: `${axis.name}: not recorded` }),
    healthy ? el('p', { class: 'healthy', title: metric.meaning, text: `healthy: ${metric.healthy.replaceAll('`', '')}` }) : null,
  );
}
