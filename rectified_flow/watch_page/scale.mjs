// The arithmetic of a chart's axes: round numbers, ranges, smoothing, and numbers as text.

export const shown = (value) =>
  value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5) ? value.toExponential(2) : String(Number(value.toPrecision(4)));

// An exponential mean of [[step, value], ...], corrected for its start as Adam's are.
export function smooth(points, share) {
  let mean = 0, weight = 0;
  return points.map(([step, value]) => {
    mean = share * mean + (1 - share) * value;
    weight = share * weight + (1 - share);
    return [step, mean / weight];
  });
}

// Round numbers between two others: 1, 2 or 5 times a power of ten apart.
export function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let number = Math.ceil(low / size); number * size <= high * (1 + 1e-9); number++) found.push(number * size);
  return found;
}

// Decimal logarithms of round numbers, between two others.
export function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(low); power <= high; power++) {
    for (const digit of [1, 2, 5]) {
      const value = power + Math.log10(digit);
      if (value >= low && value <= high) found.push(value);
    }
  }
  return found.length > 1 ? found : ticks(low, high, 3);
}

// The least and the greatest of the values, with some room around them.
export function range(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  const room = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
  return [low - room, high + room];
}

// The point of [[step, value], ...] whose step is nearest.
export const nearest = (points, step) =>
  points.reduce((best, each) => (Math.abs(each[0] - step) < Math.abs(best[0] - step) ? each : best));
