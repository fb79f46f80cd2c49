// Joins the parts, and in a live page keeps them current.

function section(id, title, tools, ...parts) {
  return el('section', { id, 'data-title': title }, el('div', { class: 'head' }, el('h2', { text: title }), tools), ...parts);
}

const app = {
  data: JSON.parse(document.getElementById('data').textContent),
  state: { curves: { filter: '', smooth: 0, x: 'step', log: false, open: {} }, samples: { run: 0, step: null, source: null, sort: 'order', text: '', coloring: 'advantage', chosen: null } },
  samples: null,
  redraws: {},
  redrawCurves() {
    for (const redraw of Object.values(this.redraws)) redraw();
    forgetDetached();
  },
  showStep(run, step) {
    if (!this.samples) return;
    document.getElementById('samples').scrollIntoView({ behavior: 'auto' });
    this.samples.show(run, step);
  },
  // Samples that are not in the page: a live page asks for them, a file cannot.
  async fetchSamples(run, step) {
    if (!this.data.live) return null;
    const answer = await fetch(`samples.json?run=${run}&step=${step}`);
    if (!answer.ok) return null;
    const block = await answer.json();
    const store = this.data.samples[run];
    if (block) store.problem = block.problem;
    if (block && !store.blocks.some((one) => one.step === step)) {
      store.blocks.push(block);
      store.blocks.sort((a, b) => a.step - b.step);
    }
    return block;
  },
};

const PARTS = { sweep: sweepSection, runs: runSection, overview: overviewSection, verdicts: verdictSection, evaluation: evaluationSection, curves: curveSection, timeline: timelineSection, samples: sampleSection, ledger: ledgerSection, weights: weightSection, memory: memorySection, events: eventSection, spec: specSection };

function header() {
  const { runs, live, generated } = app.data;
  const one = runs[0];
  const title = runs.map((run) => run.label).join(' · ');
  return el(
    'header',
    { class: 'top' },
    el('div', { class: 'brand', text: 'Troupe' }),
    el('div', {}, el('h1', { text: title }), el('p', { class: 'facts', id: 'facts' }, facts(one, runs))),
    el('div', { class: 'when' }, live ? el('span', { class: 'live', id: 'live', text: 'live' }) : null, el('span', { text: new Date(1000 * generated).toLocaleString() })),
  );
}

function facts(one, runs) {
  if (runs.length > 1) return runs.map((run) => `${run.label}: ${run.algorithm}, step ${count(run.steps_done)} of ${count(run.steps)}`).join('  ·  ');
  const reward = one.metrics['reward/mean'];
  const loss = one.metrics['policy/loss'];
  const span = one.outcome.seconds ? seconds(one.outcome.seconds) : '';
  const parts = [one.algorithm, one.model.split('/').pop(), `step ${count(one.steps_done)} of ${count(one.steps)}`];
  if (reward?.values.length) parts.push(`reward ${short(reward.values[0])} → ${short(reward.values.at(-1))}`);
  else if (loss?.values.length) parts.push(`loss ${short(loss.values[0])} → ${short(loss.values.at(-1))}`);
  if (span) parts.push(span);
  return parts.filter(Boolean).join('  ·  ');
}

function navigation(sections) {
  return el('nav', { 'aria-label': 'Sections' }, sections.map((one) => el('a', { href: `#${one.id}`, text: one.dataset.title })));
}

function draw(names = Object.keys(PARTS)) {
  const page = document.getElementById('page');
  const kept = new Map([...page.querySelectorAll('section')].map((one) => [one.id, one]));
  const sections = Object.entries(PARTS).map(([name, part]) => (names.includes(name) ? part(app) : kept.get(name))).filter(Boolean);
  page.replaceChildren(header(), navigation(sections), el('main', {}, sections));
  forgetDetached();
}

// Drops the samples of files that have changed, and asks for the newest step.
async function merge(update) {
  const before = app.data.samples;
  Object.assign(app.data, update);
  await Promise.all(update.samples.map(async (store, number) => {
    store.blocks = (before[number]?.blocks ?? []).filter((one) => one.stamp === store.stamps[one.step]).slice(-24);
    const newest = store.steps.at(-1);
    if (newest !== undefined && !store.blocks.some((one) => one.step === newest)) await app.fetchSamples(number, newest).catch(() => null);
  }));
}

async function poll() {
  const sign = document.getElementById('live');
  try {
    const answer = await fetch(`data.json?${new URLSearchParams({ mark: app.data.mark })}`);
    sign?.classList.toggle('lost', !answer.ok);
    if (answer.status === 200) {
      const update = await answer.json();
      if (update.mark !== app.data.mark) {
        await merge(update);
        const busy = document.activeElement?.closest('#samples');
        const top = window.scrollY;
        draw(Object.keys(PARTS).filter((name) => name !== 'spec' && (name !== 'samples' || !busy)));
        window.scrollTo(0, top);
      }
    }
  } catch {
    sign?.classList.add('lost');
  }
  setTimeout(poll, 2000);
}

draw();
if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
document.documentElement.dataset.ready = 'true';
if (app.data.live) poll();
