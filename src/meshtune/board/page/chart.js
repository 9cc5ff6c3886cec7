// Curves on a canvas. Each column of pixels is drawn from its lowest to its highest value, so that ten thousand points
// cost as much as a thousand and no spike is lost. Arrow keys and the pointer read single values.

import { h } from './dom.js';
import { byteUnit, number } from './format.js';
import { language, t } from './text.js';
import { axisOf } from './ticks.js';

const [TOP, RIGHT, BOTTOM, GAP] = [26, 14, 42, 6];
const PICTURE = { width: 960, height: 480, ratio: 2, head: 64 };

// A chart with a title. `unit` stands above its axis; `inBytes` values are shown in the unit that fits them.
// `set(series, x, logarithmic)` draws [{label, x, y, colour, faint, dots}], where x ascends and y may have null, over an axis {title, whole}.
export function chart(title, { unit = '', inBytes = false } = {}) {
  const canvas = h('canvas', { class: 'plot', tabindex: 0, role: 'img' });
  const readout = h('div', { class: 'readout', role: 'status' });
  const legend = h('div', { class: 'legend' });
  const save = h('span', { class: 'save' }, ['PNG', 'CSV'].map((form) => h('button', { type: 'button', class: 'plain', 'aria-label': `${t('chart.download', { form })}: ${title}`,
    title: t('chart.download', { form }), onclick: () => (form === 'PNG' ? savePicture() : saveTable()) }, form)));
  const element = h('figure', { class: 'card chart' }, h('figcaption', {}, h('span', {}, title), h('div', { class: 'marks' }, legend, save)), h('div', { class: 'area' }, canvas, readout));
  let series = [];
  let xAxis = { title: '', whole: true };
  let logarithmic = false;
  let shownUnit = unit;
  let cursor = null;
  let due = false;
  let inView = false;

  const write = (value) => (inBytes && value !== null && value !== undefined ? `${number(value, 3)} ${shownUnit}` : number(value));

  function draw() {
    due = false;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width) return;
    const ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
    if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
    const paint = canvas.getContext('2d');
    paint.setTransform(ratio, 0, 0, ratio, 0, 0);
    paint.clearRect(0, 0, width, height);
    const scale = plot(paint, width, height);
    if (scale && cursor !== null) mark(paint, scale, getComputedStyle(canvas), height);
  }

  // Axes and curves; null where there is nothing to draw.
  function plot(paint, width, height) {
    const theme = getComputedStyle(canvas);
    paint.font = `12px ${theme.fontFamily}`;
    const scale = scaleOf(paint, series, width, height, xAxis, logarithmic);
    if (!scale) return null;
    axes(paint, scale, theme, width, height, xAxis.title, shownUnit);
    for (const one of series) curve(paint, scale, one, theme.getPropertyValue(`--curve-${one.colour}`));
    return scale;
  }

  function mark(paint, scale, theme, height) {
    const at = scale.x(cursor);
    paint.strokeStyle = theme.getPropertyValue('--quiet');
    paint.beginPath();
    paint.moveTo(at, TOP);
    paint.lineTo(at, height - BOTTOM);
    paint.stroke();
  }

  // What is out of view is drawn when it comes into view.
  function redraw() {
    if (due || !inView) return;
    due = true;
    requestAnimationFrame(draw);
  }

  const labels = () => series.filter((one) => !one.faint && one.y.length).map((one) => [one, `${one.label} ${write(one.y[one.y.length - 1])}`.trim()]);

  function describe() {
    canvas.setAttribute('aria-label', `${title}. ${labels().map(([, text]) => text).join(', ')}`);
    legend.replaceChildren(...labels().map(([one, text]) => h('span', {}, h('span', { class: `swatch curve-${one.colour}` }), text)));
  }

  function read(x) {
    cursor = x;
    const values = series.filter((one) => one.x.length).map((one) => [one, nearest(one.x, x)]);
    if (!values.length) return;
    cursor = values.reduce((best, [one, index]) => (Math.abs(one.x[index] - x) < Math.abs(best - x) ? one.x[index] : best), Infinity);
    const shown = values.filter(([one, index]) => one.x[index] === cursor).map(([one, index]) => `${one.label} ${write(one.y[index])}`.trim());
    readout.replaceChildren(...[`${xAxis.title} ${number(cursor)}`, ...shown].map((text) => h('div', {}, text)));
    const middle = series.reduce((sum, one) => sum + (one.x[0] ?? 0) + (one.x[one.x.length - 1] ?? 0), 0) / (2 * series.length);
    readout.classList.toggle('left', cursor > middle);
    redraw();
  }

  async function savePicture() {
    const { width, height, ratio, head } = PICTURE;
    const sheet = h('canvas', { width: width * ratio, height: (height + head) * ratio });
    const paint = sheet.getContext('2d');
    const theme = getComputedStyle(canvas);
    paint.scale(ratio, ratio);
    paint.fillStyle = theme.getPropertyValue('--card');
    paint.fillRect(0, 0, width, height + head);
    paint.fillStyle = theme.getPropertyValue('--ink');
    paint.font = `600 16px ${theme.fontFamily}`;
    paint.fillText(title, 16, 28);
    paint.font = `13px ${theme.fontFamily}`;
    let left = 16;
    for (const [one, text] of labels()) {
      paint.fillStyle = theme.getPropertyValue(`--curve-${one.colour}`);
      paint.fillRect(left, 42, 11, 11);
      paint.fillStyle = theme.getPropertyValue('--quiet');
      paint.fillText(text, left + 16, 52);
      left += paint.measureText(text).width + 36;
    }
    paint.translate(16, head);
    plot(paint, width - 32, height - 8);
    sheet.toBlob((blob) => download(blob, 'png'), 'image/png');
  }

  // A row of each place on the axis, with a column of each curve.
  function saveTable() {
    const places = [...new Set(series.flatMap((one) => one.x))].sort((one, two) => one - two);
    const columns = series.map((one) => new Map(one.x.map((x, index) => [x, one.y[index]])));
    const named = series.map((one) => [title, one.label, shownUnit && `(${shownUnit})`].filter(Boolean).join(' '));
    const lines = [[xAxis.title, ...named], ...places.map((x) => [x, ...columns.map((column) => column.get(x) ?? '')])];
    const quoted = (cell) => (/[",\n]/.test(cell) ? `"${String(cell).replaceAll('"', '""')}"` : cell);
    download(new Blob([lines.map((line) => `${line.map(quoted).join(',')}\n`).join('')], { type: 'text/csv' }), 'csv');
  }

  function download(blob, ending) {
    const link = h('a', { href: URL.createObjectURL(blob), download: `${title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, '-')}.${ending}` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  canvas.addEventListener('pointermove', (event) => {
    const paint = canvas.getContext('2d');
    const scale = scaleOf(paint, series, canvas.clientWidth, canvas.clientHeight, xAxis, logarithmic);
    if (scale) read(scale.back(event.offsetX));
  });
  canvas.addEventListener('pointerleave', () => {
    cursor = null;
    readout.textContent = '';
    redraw();
  });
  canvas.addEventListener('keydown', (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const longest = series.reduce((best, one) => (one.x.length > best.length ? one.x : best), []);
    if (!step || !longest.length) return;
    event.preventDefault();
    const index = cursor === null ? longest.length - 1 : nearest(longest, cursor) + step;
    read(longest[Math.max(0, Math.min(longest.length - 1, index))]);
  });
  const observer = new ResizeObserver(redraw);
  observer.observe(canvas);
  const visible = new IntersectionObserver(([entry]) => {
    inView = entry.isIntersecting;
    redraw();
  });
  visible.observe(canvas);
  const dark = matchMedia('(prefers-color-scheme: dark)');
  dark.addEventListener('change', redraw);
  window.addEventListener('theme', redraw);

  return {
    element,
    set(newSeries, newAxis, isLogarithmic = false) {
      xAxis = newAxis;
      logarithmic = isLogarithmic;
      series = newSeries;
      if (inBytes) {
        const { name, size } = byteUnit(newSeries.reduce((most, one) => one.y.reduce((best, value) => Math.max(best, value ?? 0), most), 0));
        shownUnit = name;
        series = newSeries.map((one) => ({ ...one, y: one.y.map((value) => value === null ? null : value / size) }));
      }
      describe();
      redraw();
    },
    close() {
      observer.disconnect();
      visible.disconnect();
      dark.removeEventListener('change', redraw);
      window.removeEventListener('theme', redraw);
    },
  };
}

// The span of train.report.smoothing: about a twentieth of a run, at most 50 updates.
export const spanOf = (total) => Math.max(1, Math.min(50, total / 20));

// The exponential mean over about `span` updates, which grows to that from 1.
export function smoothed(values, span) {
  let mean = null;
  let count = 0;
  return values.map((value) => {
    if (value === null) return mean;
    const weight = 1 / Math.min(span, 1 + count / 4);
    mean = mean === null ? value : mean + weight * (value - mean);
    count += 1;
    return mean;
  });
}

function scaleOf(paint, series, width, height, xAxis, logarithmic) {
  let [x0, x1, y0, y1, least] = [Infinity, -Infinity, Infinity, -Infinity, Infinity];
  for (const one of series) {
    if (!one.x.length) continue;
    x0 = Math.min(x0, one.x[0]);
    x1 = Math.max(x1, one.x[one.x.length - 1]);
    for (const value of one.y) {
      if (value === null || value === undefined) continue;
      if (value < y0) y0 = value;
      if (value > y1) y1 = value;
      if (value > 0 && value < least) least = value;
    }
  }
  if (x0 > x1 || y0 > y1) return null;
  const isLogarithmic = logarithmic && least <= y1 && y0 >= 0;
  const tall = height - TOP - BOTTOM;
  const y = axisOf(isLogarithmic ? least : y0, y1, Math.max(3, Math.floor(tall / 44)), { logarithmic: isLogarithmic, locale: language });
  const left = GAP + 2 + Math.max(...y.ticks.map((tick) => paint.measureText(tick.text).width));
  const inner = width - left - RIGHT;
  const x = axisOf(x0, x1, Math.max(2, Math.floor(inner / 60)), { whole: xAxis.whole, end: true, locale: language });
  const transform = isLogarithmic ? Math.log10 : (value) => value;
  const [bottom, top] = [transform(y.low), transform(y.high)];
  return {
    left, ticksX: x.ticks, ticksY: y.ticks,
    x: (value) => left + ((value - x.low) / (x.high - x.low)) * inner,
    y: (value) => TOP + (1 - (transform(value) - bottom) / (top - bottom)) * tall,
    back: (pixel) => x.low + ((pixel - left) / inner) * (x.high - x.low),
  };
}

function axes(paint, scale, theme, width, height, xTitle, yTitle) {
  paint.fillStyle = theme.getPropertyValue('--quiet');
  paint.strokeStyle = theme.getPropertyValue('--line');
  paint.lineWidth = 1;
  paint.textBaseline = 'middle';
  paint.textAlign = 'right';
  for (const { value, text } of scale.ticksY) {
    const y = scale.y(value);
    paint.beginPath();
    paint.moveTo(scale.left, y);
    paint.lineTo(width - RIGHT, y);
    paint.stroke();
    paint.fillText(text, scale.left - GAP, y);
  }
  paint.textBaseline = 'alphabetic';
  paint.textAlign = 'left';
  paint.fillText(yTitle, 0, 12);
  paint.textAlign = 'center';
  let taken = Infinity; // from the right: the last value stands, and what would overlap it does not
  for (const { value, text } of [...scale.ticksX].reverse()) {
    const half = paint.measureText(text).width / 2;
    const at = Math.min(scale.x(value), width - half);
    if (at + half + GAP > taken) continue;
    taken = at - half;
    paint.fillText(text, at, height - BOTTOM + 18);
  }
  paint.fillText(xTitle, (scale.left + width - RIGHT) / 2, height - 5);
}

function curve(paint, scale, one, colour) {
  paint.strokeStyle = colour;
  paint.fillStyle = colour;
  paint.globalAlpha = one.faint ? 0.35 : 1;
  paint.lineWidth = one.faint ? 1 : 2;
  paint.lineJoin = 'round';
  paint.beginPath();
  let column = null;
  let [low, high, last] = [0, 0, 0];
  let pen = false;
  const flush = () => {
    if (column === null) return;
    if (pen) paint.lineTo(column, low);
    else paint.moveTo(column, low);
    if (high !== low) paint.lineTo(column, high);
    if (last !== high) paint.lineTo(column, last);
    pen = true;
  };
  for (let index = 0; index < one.x.length; index += 1) {
    const value = one.y[index];
    const y = value === null || value === undefined ? NaN : scale.y(value);
    if (!Number.isFinite(y)) {
      flush();
      column = null;
      pen = false;
      continue;
    }
    const x = Math.round(scale.x(one.x[index]) * 2) / 2;
    if (x !== column) {
      flush();
      column = x;
      low = y;
      high = y;
    }
    low = Math.max(low, y);
    high = Math.min(high, y);
    last = y;
  }
  flush();
  paint.stroke();
  if (one.dots && one.x.length < 200) {
    one.x.forEach((x, index) => {
      if (one.y[index] === null) return;
      paint.beginPath();
      paint.arc(scale.x(x), scale.y(one.y[index]), 3.5, 0, 7);
      paint.fill();
    });
  }
  if (!one.faint && column !== null) {
    paint.beginPath();
    paint.arc(column, last, 3.5, 0, 7);
    paint.fill();
  }
  paint.globalAlpha = 1;
}

// The index of the entry of an ascending list that is nearest to a value.
function nearest(list, value) {
  let [low, high] = [0, list.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - list[low - 1] < list[low] - value ? low - 1 : low;
}
