// What the model wrote, and what it got for it.

const ORDERS = {
  order: { label: 'in order', key: null },
  best: { label: 'best first', key: (block, row) => block.reward[row], falling: true },
  worst: { label: 'worst first', key: (block, row) => block.reward[row] },
  surprising: { label: 'most surprising first', key: (block, row) => block.surprise[row], falling: true },
  gap: { label: 'largest sampler gap first', key: (block, row) => block.gap[row], falling: true },
  longest: { label: 'longest first', key: (block, row) => block.length[row], falling: true },
};

function sampleSection(app) {
  const runs = app.data.runs.map((run, number) => number).filter((number) => app.data.samples[number].steps.length);
  if (!runs.length) return section('samples', 'Samples', null, el('p', { class: 'empty', text: app.data.live ? 'No samples yet.' : 'No samples are recorded (output.trajectories: false, or an offline run).' }));
  const state = app.state.samples;
  if (!runs.includes(state.run)) state.run = runs[0];
  const view = new SampleView(app, runs);
  app.samples = view;
  return view.node;
}

// Prompts are named by the end of what the user says last, without the words with which all prompts of the step begin.
const promptNames = new WeakMap();
const LONGEST_NAME = 120;

function promptName(block, number) {
  if (!promptNames.has(block)) promptNames.set(block, namesOf(block.prompts.map(lastSaid)));
  return promptNames.get(block)[number];
}

function lastSaid(messages) {
  const asked = messages.filter(([role]) => role !== 'assistant' && role !== 'system');
  return ((asked.at(-1) ?? messages.at(-1))?.[1] ?? '').replaceAll(/\s+/g, ' ').trim();
}

function namesOf(texts) {
  const known = [...new Set(texts)];
  let shared = known.length > 1 ? known[0].length : 0;
  for (const text of known) while (!text.startsWith(known[0].slice(0, shared))) shared -= 1;
  const start = known.length ? known[0].lastIndexOf(' ', shared - 1) + 1 : 0;
  return texts.map((text) => (text ? (start > 12 ? `… ${text.slice(start, start + LONGEST_NAME)}` : text.slice(0, LONGEST_NAME)) : '(empty prompt)'));
}

class SampleView {
  constructor(app, runs) {
    this.app = app;
    this.state = app.state.samples;
    this.runs = runs;
    this.items = [];
    this.list = virtualList({ height: 46, label: 'samples', draw: (i) => this.row(i) });
    this.found = el('span', { class: 'count', id: 'found' });
    this.steps = el('select', { id: 'step', 'aria-label': 'Step', onchange: (event) => this.set({ step: event.target.value === '' ? null : Number(event.target.value) }) });
    this.sources = el('select', { id: 'source', 'aria-label': 'Source', onchange: (event) => this.set({ source: event.target.value || null }) });
    this.detail = el('div', { class: 'detail', id: 'detail' });
    this.note = el('p', { class: 'healthy' });
    this.node = section('samples', 'Samples', this.tools(), this.note, el('div', { class: 'two' }, this.list.node, this.detail));
    this.list.node.addEventListener('keydown', (event) => this.key(event));
    this.refresh();
  }

  tools() {
    const picked = (name, entries, label) => el('select', { id: name, 'aria-label': label, onchange: (event) => this.set({ [name]: event.target.value }) }, entries.map(([value, text]) => el('option', { value, text, selected: String(this.state[name]) === String(value) })));
    const run = this.runs.length > 1 ? el('select', { id: 'run', 'aria-label': 'Run', onchange: (event) => this.set({ run: Number(event.target.value), step: null, chosen: null }) }, this.runs.map((number) => el('option', { value: number, text: this.app.data.runs[number].label, selected: number === this.state.run }))) : null;
    this.coloring = el('select', { id: 'coloring', 'aria-label': 'Colour of tokens', onchange: (event) => { this.state.coloring = event.target.value; this.showDetail(); } });
    this.search = el('input', { type: 'search', id: 'search', placeholder: 'Search prompts, responses, status', 'aria-label': 'Search samples', value: this.state.text, oninput: debounce(150, (event) => this.set({ text: event.target.value })) });
    return el('div', { class: 'tools' }, run, this.steps, this.sources, picked('sort', Object.entries(ORDERS).map(([value, { label }]) => [value, label]), 'Order'), this.search, el('label', { class: 'check' }, 'tokens by ', this.coloring), this.found);
  }

  get store() {
    return this.app.data.samples[this.state.run];
  }

  set(change) {
    Object.assign(this.state, change);
    this.refresh();
  }

  // The samples of one step; in a live page they may have to be asked for first.
  async show(run, step) {
    Object.assign(this.state, { run: this.runs.includes(run) ? run : this.state.run, text: '', sort: 'order' });
    const { blocks, steps } = this.store;
    let at = steps[nearest(steps, step)];
    if (!blocks.some((one) => one.step === at)) {
      const fetched = await this.app.fetchSamples(this.state.run, at);
      if (!fetched && blocks.length) at = blocks[nearest(blocks.map((one) => one.step), step)].step;
    }
    this.search.value = '';
    this.node.querySelector('#sort').value = 'order';
    this.set({ step: at, chosen: null });
  }

  refresh() {
    const { store, state } = this;
    if (state.step !== null && !store.blocks.some((one) => one.step === state.step)) state.step = null;
    this.steps.replaceChildren(el('option', { value: '', text: store.blocks.length > 1 ? `all ${store.blocks.length} steps` : 'all steps' }), ...store.blocks.map((one) => el('option', { value: one.step, text: `step ${one.step}`, selected: one.step === state.step })));
    const names = [...new Set(store.blocks.flatMap((one) => one.source ?? []))].filter(Boolean).sort();
    if (!names.includes(state.source)) state.source = null;
    this.sources.hidden = !names.length;
    this.sources.replaceChildren(el('option', { value: '', text: 'all sources' }), ...names.map((name) => el('option', { value: name, text: name, selected: name === state.source })));
    this.note.textContent = [store.rule, this.cut(), store.problem ? `Tokens are not shown: ${store.problem}` : ''].filter(Boolean).join(' ');
    this.note.hidden = !this.note.textContent;
    this.items = this.select();
    this.found.textContent = `${count(this.items.length)} samples`;
    this.span = this.rewardSpan();
    const kept = this.items.findIndex(([block, row]) => this.isChosen(block, row));
    this.list.show(this.items.length);
    this.choose(kept < 0 ? 0 : kept, kept >= 0);
  }

  // What is missing of steps with more samples than the page takes.
  cut() {
    const cut = this.store.blocks.filter((one) => one.rows && (this.state.step === null || one.step === this.state.step));
    const parts = cut.map((one) => `the first ${count(one.group.length)} of ${count(one.rows)} samples of step ${one.step}`);
    return parts.length ? `Only ${parts.join(', ')} are in the page, so that it stays small.` : '';
  }

  select() {
    const { state } = this;
    const wanted = state.text.trim().toLowerCase();
    const items = [];
    for (const block of this.store.blocks) {
      if (state.step !== null && block.step !== state.step) continue;
      const prompts = wanted ? block.prompts.map((messages) => messages.some(([, text]) => text.toLowerCase().includes(wanted))) : null;
      for (let row = 0; row < block.group.length; row += 1) {
        if (state.source !== null && block.source?.[row] !== state.source) continue;
        if (wanted && !prompts[block.prompt[row]] && !block.response[row].toLowerCase().includes(wanted) && !block.status[row].toLowerCase().includes(wanted)) continue;
        items.push([block, row]);
      }
    }
    const { key, falling } = ORDERS[state.sort];
    if (!key) return items;
    const last = falling ? -Infinity : Infinity;
    const keyed = items.map((item) => [key(...item) ?? last, item]);
    keyed.sort((a, b) => (falling ? b[0] - a[0] : a[0] - b[0]));
    return keyed.map(([, item]) => item);
  }

  rewardSpan() {
    let low = Infinity;
    let high = -Infinity;
    for (const [block, row] of this.items) {
      const reward = block.reward[row];
      if (reward === null) continue;
      low = Math.min(low, reward);
      high = Math.max(high, reward);
    }
    return [low, high];
  }

  isChosen(block, row) {
    const { chosen } = this.state;
    return chosen !== null && chosen[0] === block.step && chosen[1] === row;
  }

  row(i) {
    const [block, row] = this.items[i];
    const reward = block.reward[row];
    const [low, high] = this.span;
    const share = reward === null ? 0 : high > low ? (reward - low) / (high - low) : 1;
    const failed = block.status[row] !== 'ok';
    return el(
      'div',
      { class: `row${this.isChosen(block, row) ? ' chosen' : ''}`, role: 'option', onclick: () => this.choose(i) },
      el('span', { class: 'where', text: `${block.step} · ${block.sample[row]}` }),
      el('span', { class: `reward${failed ? ' failed' : ''}` }, el('i', { style: { width: `${100 * share}%` } }), el('b', { text: failed ? 'failed' : short(reward) })),
      el('span', { class: 'said' }, modelText('b', promptName(block, block.prompt[row]), { class: 'start' }), modelText('span', block.response[row].slice(0, 200) || '(empty)', { class: 'start' })),
    );
  }

  key(event) {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (!by) return;
    event.preventDefault();
    const at = this.items.findIndex(([block, row]) => this.isChosen(block, row));
    this.choose(Math.max(0, Math.min(this.items.length - 1, at + by)));
  }

  choose(i, silent = false) {
    if (!this.items.length) {
      this.detail.replaceChildren(el('p', { class: 'empty', text: 'No sample matches.' }));
      return;
    }
    const [block, row] = this.items[i];
    this.state.chosen = [block.step, row];
    if (!silent) this.list.reveal(i);
    this.showDetail();
  }

  showDetail() {
    const { chosen } = this.state;
    const block = chosen && this.store.blocks.find((one) => one.step === chosen[0]);
    if (!block) return;
    const row = chosen[1];
    const ways = block.tokens ? colorings(block) : [];
    if (!ways.includes(this.state.coloring)) this.state.coloring = ways[0] ?? '';
    this.coloring.replaceChildren(...(ways.length ? ways : ['']).map((name) => el('option', { value: name, text: name ? COLORINGS[name].label : 'nothing', selected: name === this.state.coloring })));
    const group = block.group.map((uid, i) => i).filter((i) => block.group[i] === block.group[row]);
    const rest = group.filter((i) => i !== row);
    this.detail.replaceChildren(
      el('header', {}, el('h4', { title: visible(String(block.group[row])) }, `Step ${block.step}: `, modelText('span', promptName(block, block.prompt[row]))), scaleLegend(block, this.state.coloring), el('span', { class: 'value', text: `${group.length} sample${group.length > 1 ? 's' : ''}` })),
      ...block.prompts[block.prompt[row]].map(([role, text]) => message(role, text)),
      block.answer[row] ? el('p', { class: 'answer' }, 'answer: ', modelText('b', block.answer[row])) : null,
      el('div', { class: 'group-grid' }, [row, ...rest].map((i) => this.card(block, i, i === row))),
    );
  }

  card(block, row, chosen) {
    const facts = Object.entries(block.components).map(([name, values]) => [name, values[row]]).filter(([, value]) => value !== null);
    const status = block.status[row];
    const versions = [...new Set(block.versions[row].map(([version]) => version))];
    return el(
      'article',
      { class: `sample${chosen ? ' chosen' : ''}` },
      el('header', {}, el('span', { class: 'where', text: `#${block.sample[row]}${block.segment[row] ? ` part ${block.segment[row] + 1}` : ''}` }), el('b', { class: status === 'ok' ? '' : 'failed', text: status === 'ok' ? short(block.reward[row]) : 'failed' }), el('span', { class: 'meta', text: `${block.length[row]} tokens · ${block.finish[row]}${versions.length ? ` · v${versions.join(', v')}` : ''}${block.trained[row] === false ? ' · not trained' : ''}` })),
      facts.length > 1 || facts[0]?.[1] !== block.reward[row] ? el('p', { class: 'parts' }, facts.map(([name, value]) => el('span', {}, modelText('code', name), ` ${short(value)}`))) : null,
      status === 'ok' ? null : modelText('p', status, { class: 'failed' }),
      block.conversation[row] ? el('details', {}, el('summary', { text: 'turns' }), block.conversation[row].map(([role, text]) => message(role, text))) : null,
      tokenText(block, row, this.state.coloring || null),
    );
  }
}

const message = (role, text) => el('div', { class: `message ${['system', 'user', 'assistant', 'tool'].includes(role) ? role : ''}` }, modelText('span', role, { class: 'role' }), modelText('div', text, { class: 'text' }));
