// Colours are CSS variables, so that both themes and the printer have their own.

const runColor = (number) => `var(--run-${number % 6})`;

// Backgrounds of tokens: a share of a strong colour over the card, so that the text keeps its contrast.
function diverging(value, reach) {
  const strength = reach > 0 ? Math.min(1, Math.abs(value) / reach) : 0;
  return tint(value < 0 ? '--bad' : '--good', strength);
}

const sequential = (value, low, high) => tint('--heat', high > low ? (value - low) / (high - low) : 0);
const tint = (variable, strength) => `color-mix(in srgb, var(${variable}) ${(62 * Math.max(0, Math.min(1, strength))).toFixed(0)}%, transparent)`;
