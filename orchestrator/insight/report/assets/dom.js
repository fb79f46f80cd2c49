// Elements, numbers and text. Text of a model reaches the page through textContent only.

const SVG = 'http://www.w3.org/2000/svg';

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === 'text') node.textContent = value;
    else if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'style') for (const [key, v] of Object.entries(value)) node.style.setProperty(key, v);
    else node.setAttribute(name, value === true ? '' : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}

const el = (tag, props, ...children) => fill(document.createElement(tag), props, children);
const svg = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

// A short form of a number: so many significant digits, thousands as k, M, G.
function short(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–';
  const size = Math.abs(value);
  if (value === 0) return '0';
  if (size >= 1e4) {
    const power = Math.min(3, Math.floor(Math.log10(size) / 3));
    return `${Number((value / 1000 ** power).toPrecision(digits - 1))}${['', 'k', 'M', 'G'][power]}`;
  }
  if (size < 1e-3) return value.toExponential(digits - 3).replaceAll('-', '−');
  return String(Number(value.toPrecision(digits))).replace('-', '−');
}

function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–';
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 7200) return `${(value / 60).toFixed(1)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(share < 0.095 ? 1 : 0)}%` : '–');
const count = (value) => Math.round(value).toLocaleString('en');

// Characters that would steer a terminal or turn the direction of text are shown, not obeyed.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;

function visible(text) {
  return text.replace(HIDDEN, (character) => {
    const code = character.charCodeAt(0);
    if (character === '\r') return '␍';
    if (code < 32) return String.fromCharCode(0x2400 + code);
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, '0')}⟩`;
  });
}

// Text of a model, in an element that its directions cannot leave.
const modelText = (tag, text, props) => el(tag, { dir: 'auto', ...props, text: visible(text) });

// Text in which `code` stands between backquotes.
const marked = (text) => text.split('`').map((part, i) => (i % 2 ? el('code', { text: part }) : part)).filter((part) => part !== '');

function debounce(wait, action) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...given), wait);
  };
}

function tip(text, at) {
  let box = document.getElementById('tip');
  if (!box) document.body.append((box = el('div', { id: 'tip', role: 'status' })));
  box.hidden = !text;
  if (!text) return;
  box.replaceChildren(...[text].flat().map((line) => (typeof line === 'string' ? el('div', { text: line }) : line)));
  const wide = box.offsetWidth;
  const x = at.clientX + 14 + wide > window.innerWidth ? at.clientX - wide - 10 : at.clientX + 14;
  box.style.setProperty('left', `${Math.max(4, x)}px`);
  box.style.setProperty('top', `${Math.min(at.clientY + 14, window.innerHeight - box.offsetHeight - 6)}px`);
}

// Things that are drawn when they come into view, at the width they have, and again when the width changes.
const lazy = new Map();
const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) if (entry.isIntersecting) drawLazy(entry.target);
  },
  { rootMargin: '300px' },
);

function drawLazy(node) {
  const known = lazy.get(node);
  if (!known) return;
  const width = node.clientWidth || 360;
  if (known.width === width) return;
  known.width = width;
  node.replaceChildren(known.draw(width));
}

function whenSeen(node, draw) {
  lazy.set(node, { draw, width: 0 });
  watcher.observe(node);
  return node;
}

// What left the page is let go of, with all that hangs on it: a live page is drawn anew with every change of the run.
function forgetDetached() {
  for (const node of lazy.keys()) {
    if (node.isConnected) continue;
    lazy.delete(node);
    watcher.unobserve(node);
  }
}

window.addEventListener(
  'resize',
  debounce(120, () => {
    forgetDetached();
    for (const [node, known] of lazy) if (known.width) drawLazy(node);
  }),
);
window.addEventListener('beforeprint', () => {
  for (const folded of document.querySelectorAll('#verdicts details')) folded.open = true;
  for (const node of lazy.keys()) drawLazy(node);
});
