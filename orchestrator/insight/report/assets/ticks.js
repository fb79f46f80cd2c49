// Where an axis is labelled, and with what.

function ticks(low, high, wanted) {
  if (!(high > low)) return [low];
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= rough) * power;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return found;
}

function stepTicks(low, high, wanted) {
  return [...new Set(ticks(low, high, wanted).filter(Number.isInteger))];
}

// Powers of ten, with 2 and 5 between them where there are few; evenly spread ticks within less than a decade.
function logTicks(low, high, wanted) {
  if (high / low < 10) return ticks(low, high, wanted);
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / (wanted + 1)));
  const found = [];
  for (let power = first; power <= last; power += every) {
    for (const m of last - first <= 2 ? [1, 2, 5] : [1]) found.push(m * 10 ** power);
  }
  return found.filter((at) => at >= low && at <= high);
}

// Texts of ticks, with as many digits as tell them apart.
function tickTexts(values, text = short) {
  const apart = (digits) => values.map((value) => text(value, digits));
  for (let digits = 4; digits < 12; digits += 1) {
    const texts = apart(digits);
    if (new Set(texts).size === texts.length) return texts;
  }
  return apart(12);
}
