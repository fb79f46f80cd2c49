// Tokens of a response, coloured by what was computed for them.

const COLORINGS = {
  advantage: { label: 'advantage', scale: 'diverging' },
  gap: { label: 'sampler less trainer', scale: 'diverging' },
  entropy: { label: 'entropy', scale: 'sequential' },
  probability: { label: 'probability', scale: 'falling' },
  value: { label: 'value', scale: 'diverging' },
  version: { label: 'weight version', scale: 'category' },
};
const MOST_TOKENS = 600;

function bytes(text) {
  const raw = atob(text);
  const found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) found[i] = raw.charCodeAt(i);
  return found;
}

function tokensOf(block, row) {
  if (!block.tokens) return null;
  const raw = bytes(block.tokens[row]).buffer;
  return block.wide ? new Uint32Array(raw) : new Uint16Array(raw);
}

// Values of a row's tokens; null where they were not computed.
function valuesOf(block, row, name) {
  if (name === 'version') return versionsOf(block, row);
  const known = block.values?.[name];
  if (!known) return null;
  const stored = known.rows[row];
  if (stored === null) return () => null;
  if (typeof stored === 'number') return () => stored;
  const levels = bytes(stored);
  return (i) => (levels[i] ? known.low + ((levels[i] - 1) / 254) * (known.high - known.low) : null);
}

function versionsOf(block, row) {
  const spans = block.versions[row];
  return (i) => spans.find(([, start, end]) => i >= start && i < end)?.[0] ?? null;
}

function colorings(block) {
  const versions = new Set(block.versions.flatMap((spans) => spans.map(([version]) => version)));
  return Object.keys(COLORINGS).filter((name) => (name === 'version' ? versions.size : block.values?.[name]));
}

function tokenColor(block, name) {
  if (name === 'version') {
    const versions = [...new Set(block.versions.flatMap((spans) => spans.map(([version]) => version)))].sort((a, b) => a - b);
    return (value) => `color-mix(in srgb, ${runColor(versions.indexOf(value))} 28%, transparent)`;
  }
  const { low, high } = block.values[name];
  const scale = COLORINGS[name].scale;
  if (scale === 'diverging') return (value) => diverging(value, Math.max(Math.abs(low), Math.abs(high)));
  if (scale === 'falling') return (value) => sequential(1 - value, 0, 1);
  return (value) => sequential(value, low, high);
}

function tokenText(block, row, name, all = false) {
  const ids = tokensOf(block, row);
  if (!ids) return modelText('div', block.response[row] || '(empty)', { class: 'text' });
  const value = name ? valuesOf(block, row, name) : null;
  const color = value ? tokenColor(block, name) : null;
  const mask = block.mask ? bytes(block.mask[row]) : null;
  const shown = all ? ids.length : Math.min(ids.length, MOST_TOKENS);
  const holder = el('div', { class: 'text tokens', dir: 'auto' });
  for (let i = 0; i < shown; i += 1) {
    const found = value ? value(i) : null;
    const token = el('span', { class: mask && !mask[i] ? 'given' : null, text: visible(block.vocabulary[ids[i]]) });
    if (found !== null) {
      token.style.setProperty('background-color', color(found));
      token.dataset.value = `${COLORINGS[name].label} ${short(found)}`;
    }
    holder.append(token);
  }
  if (ids.length > shown) holder.append(el('button', { class: 'link', text: ` … ${count(ids.length - shown)} more tokens`, onclick: () => holder.replaceWith(tokenText(block, row, name, true)) }));
  const longer = block.length[row] - ids.length;
  if (longer > 0) holder.append(el('em', { text: ` … ${count(longer)} more tokens are in the samples' file` }));
  holder.addEventListener('pointermove', (event) => tip(event.target.dataset?.value ? [event.target.dataset.value] : null, event));
  holder.addEventListener('pointerleave', () => tip(null));
  return holder;
}

function scaleLegend(block, name) {
  if (!name || name === 'version' || !block.values?.[name]) return null;
  const { low, high } = block.values[name];
  const [from, to] = name === 'probability' ? [1, 0] : COLORINGS[name].scale === 'diverging' ? [-Math.max(Math.abs(low), Math.abs(high)), Math.max(Math.abs(low), Math.abs(high))] : [low, high];
  return el('span', { class: 'scale' }, short(from), el('i', { class: COLORINGS[name].scale === 'diverging' ? 'ramp two' : 'ramp' }), short(to));
}
