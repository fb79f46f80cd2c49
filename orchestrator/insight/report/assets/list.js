// A list of rows of equal height, of which only those in view exist.

function virtualList({ height, draw, label }) {
  const inner = el('div', { class: 'rows' });
  const box = el('div', { class: 'list', tabindex: '0', role: 'listbox', 'aria-label': label }, inner);
  let total = 0;
  let drawn = '';
  const update = () => {
    const first = Math.max(0, Math.floor(box.scrollTop / height) - 8);
    const last = Math.min(total, Math.ceil((box.scrollTop + (box.clientHeight || 520)) / height) + 8);
    const key = `${first} ${last}`;
    if (key === drawn) return;
    drawn = key;
    const rows = [];
    for (let i = first; i < last; i += 1) {
      const row = draw(i);
      row.style.setProperty('top', `${i * height}px`);
      rows.push(row);
    }
    inner.replaceChildren(...rows);
  };
  box.addEventListener('scroll', update, { passive: true });
  new ResizeObserver(() => { drawn = ''; update(); }).observe(box);
  return {
    node: box,
    show(rows) {
      total = rows;
      drawn = '';
      inner.style.setProperty('height', `${rows * height}px`);
      update();
    },
    reveal(row) {
      const top = row * height;
      if (top < box.scrollTop || top + height > box.scrollTop + box.clientHeight) box.scrollTop = Math.max(0, top - box.clientHeight / 3);
      drawn = '';
      update();
    },
  };
}
