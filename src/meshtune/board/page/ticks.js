// The ticks of an axis: round numbers whose texts all differ. train/report/svg_plot.py makes the same for report.html.

// An axis for values from `low` to `high` with about `count` steps: {low, high, ticks: [{value, text}]}. It reaches out to a
// tick at both ends, or with `end` keeps its range and has its last value as a tick. `whole`: of whole numbers alone.
export function axisOf(low, high, count, { logarithmic = false, whole = false, end = false, locale = 'en' } = {}) {
  [low, high] = spread(low, high, whole);
  if (logarithmic && low > 0 && high / low >= 4) return decades(low, high, count, locale);
  let step = round((high - low) / count);
  if (whole) step = Math.max(1, step);
  while (logarithmic && low > 0 && low < step) step = round(step / 2.5); // an axis of logarithms has no 0
  const [first, last] = end ? [Math.ceil(low / step - 1e-9), Math.floor(high / step + 1e-9)] : [Math.floor(low / step + 1e-9), Math.ceil(high / step - 1e-9)];
  const values = [];
  for (let tick = first; tick <= last; tick += 1) values.push(Number((tick * step).toPrecision(15)) + 0);
  const ticks = values.filter((value) => !end || high - value > 0.6 * step).map((value) => ({ value, text: written(value, step, values, locale) }));
  if (end) ticks.push({ value: high, text: written(high, whole ? 1 : step / 10, [...values, high], locale, true) });
  return end ? { low, high, ticks } : { low: values[0], high: values[values.length - 1], ticks };
}

// Values that are all the same, or nearly, get an axis of some width.
function spread(low, high, whole) {
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (whole) return [low, Math.max(high, low + 1)];
  if (high - low >= size * 1e-9 && high > low) return [low, high];
  const pad = size * 0.05 || 1;
  return [low - pad, high + pad];
}

// The smallest of 1, 2, 5 and 10 times a power of ten that is no smaller.
function round(raw) {
  const power = 10 ** Math.floor(Math.log10(raw));
  return Number((power * [1, 2, 5, 10].find((factor) => factor * power >= raw * (1 - 1e-9))).toPrecision(1));
}

function decades(low, high, count, locale) {
  const [first, last] = [Math.floor(Math.log10(low) + 1e-9), Math.ceil(Math.log10(high) - 1e-9)];
  const stride = Math.ceil((last - first) / (2 * count));
  const factors = stride === 1 && 3 * (last - first) <= 2 * count + 2 ? [1, 2, 5] : [1];
  let values = [];
  for (let power = first; power < last + stride; power += stride) values.push(...factors.map((factor) => Number(`${factor}e${power}`)));
  const [from, to] = [values.findLastIndex((value) => value <= low * (1 + 1e-9)), values.findIndex((value) => value >= high * (1 - 1e-9))];
  values = values.slice(Math.max(0, from), to < 0 ? values.length : to + 1);
  return { low: values[0], high: values[values.length - 1], ticks: values.map((value) => ({ value, text: written(value, value, [value], locale) })) };
}

// A value with as many digits as a step needs; `trim` leaves out zeros at the end.
function written(value, step, values, locale, trim = false) {
  const largest = Math.max(...values.map(Math.abs));
  const power = Math.floor(Math.log10(step) + 1e-9);
  if (largest >= 1e7 || (power < -4 && largest < 0.01)) {
    if (value === 0) return '0';
    const digits = Math.max(0, Math.floor(Math.log10(Math.abs(value)) + 1e-9) - power);
    const [mantissa, exponent] = value.toExponential(Math.min(digits, 15)).split('e');
    return `${plain(Number(mantissa), digits, locale, true)}e${Number(exponent)}`;
  }
  return plain(value, Math.max(0, -power), locale, trim);
}

function plain(value, decimals, locale, trim) {
  const most = Math.min(decimals, 20);
  return new Intl.NumberFormat(locale, { minimumFractionDigits: trim ? 0 : most, maximumFractionDigits: most }).format(value);
}
