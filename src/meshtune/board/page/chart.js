// Curves on a canvas. Each column of pixels is drawn from its lowest to its highest value, so that ten thousand points
// cost as much as a thousand and no spike is lost. Arrow keys and the pointer read single values.

import { h } from './dom.js';
import { number } from './format.js';
import { t } from './text.js';

const LEFT = 66;
const [TOP, RIGHT, BOTTOM] = [10, 12, 24];

// A chart with a title. `set(series)` draws [{label, x, y, colour, faint, dots}], where x ascends and y may have null.
export function chart(title, { write = number, logarithmic = false } = {}) {
  const canvas = h('canvas', { class: 'plot', tabindex: 0, role: 'img' });
  const readout = h('div', { class: 'readout', role: 'status' });
  const legend = h('div', { class: 'legend' });
  const element = h('figure', { class: 'card chart' }, h('figcaption', {}, h('span', {}, title), legend), canvas, readout);
  let series = [];
  let cursor = null;
  let due = false;
  let inView = false;

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
    const scale = scaleOf(series, width, height, logarithmic);
    if (!scale) return;
    const theme = getComputedStyle(canvas);
    axes(paint, scale, theme, write, width, height);
    for (const one of series) curve(paint, scale, one, theme.getPropertyValue(`--curve-${one.colour}`));
    if (cursor !== null) mark(paint, scale, theme, height);
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

  function describe() {
    const last = series.filter((one) => one.y.length && !one.faint)
      .map((one) => `${one.label}: ${write(one.y[one.y.length - 1])}`);
    canvas.setAttribute('aria-label', `${title}. ${last.join(', ')}`);
    legend.replaceChildren(...series.filter((one) => !one.faint).map((one) => h('span', {},
      h('span', { class: `swatch curve-${one.colour}` }), `${one.label} ${write(one.y[one.y.length - 1])}`)));
  }

  function read(x) {
    cursor = x;
    const values = series.filter((one) => one.x.length).map((one) => [one, nearest(one.x, x)]);
    if (!values.length) return;
    cursor = values.reduce((best, [one, index]) => (Math.abs(one.x[index] - x) < Math.abs(best - x) ? one.x[index] : best), Infinity);
    const shown = values.filter(([one, index]) => one.x[index] === cursor).map(([one, index]) => `${one.label} ${write(one.y[index])}`);
    readout.textContent = `${t('chart.update', { step: cursor })}  ${shown.join('  ')}`;
    redraw();
  }

  canvas.addEventListener('pointermove', (event) => {
    const scale = scaleOf(series, canvas.clientWidth, canvas.clientHeight, logarithmic);
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
    set(newSeries) {
      series = newSeries;
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

// The exponential mean of train.report.smoothing: over about a twentieth of the run, at most 50 updates.
export function smoothed(values, total) {
  const longest = Math.max(1, Math.min(50, total / 20));
  let mean = null;
  let count = 0;
  return values.map((value) => {
    if (value === null) return mean;
    const weight = 1 / Math.min(longest, 1 + count / 4);
    mean = mean === null ? value : mean + weight * (value - mean);
    count += 1;
    return mean;
  });
}

function scaleOf(series, width, height, logarithmic) {
  let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
  const transform = logarithmic ? (value) => Math.log10(value) : (value) => value;
  for (const one of series) {
    if (!one.x.length) continue;
    x0 = Math.min(x0, one.x[0]);
    x1 = Math.max(x1, one.x[one.x.length - 1]);
    for (const value of one.y) {
      if (value === null || value === undefined || (logarithmic && value <= 0)) continue;
      const y = transform(value);
      if (y < y0) y0 = y;
      if (y > y1) y1 = y;
    }
  }
  if (x0 > x1 || y0 > y1) return null;
  if (x0 === x1) x1 = x0 + 1;
  const pad = (y1 - y0 || Math.abs(y1) || 1) * 0.06;
  y0 -= pad;
  y1 += pad;
  const [inner, tall] = [width - LEFT - RIGHT, height - TOP - BOTTOM];
  return {
    x0, x1, y0, y1,
    x: (value) => LEFT + ((value - x0) / (x1 - x0)) * inner,
    y: (value) => TOP + (1 - (transform(value) - y0) / (y1 - y0)) * tall,
    back: (pixel) => x0 + ((pixel - LEFT) / inner) * (x1 - x0),
    value: (y) => (logarithmic ? 10 ** y : y),
  };
}

function axes(paint, scale, theme, write, width, height) {
  paint.font = `12px ${theme.fontFamily}`;
  paint.fillStyle = theme.getPropertyValue('--quiet');
  paint.strokeStyle = theme.getPropertyValue('--line');
  paint.lineWidth = 1;
  paint.textBaseline = 'middle';
  paint.textAlign = 'right';
  for (const tick of ticks(scale.y0, scale.y1, 4)) {
    const y = TOP + (1 - (tick - scale.y0) / (scale.y1 - scale.y0)) * (height - TOP - BOTTOM);
    paint.beginPath();
    paint.moveTo(LEFT, y);
    paint.lineTo(width - RIGHT, y);
    paint.stroke();
    paint.fillText(write(scale.value(tick), 3), LEFT - 6, y);
  }
  paint.textBaseline = 'alphabetic';
  paint.textAlign = 'center';
  for (const tick of ticks(scale.x0, scale.x1, Math.max(2, Math.floor(width / 110)))) {
    if (!Number.isInteger(tick)) continue;
    const text = number(tick);
    const half = paint.measureText(text).width / 2;
    paint.fillText(text, Math.min(scale.x(tick), width - half), height - 6);
  }
}

function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5, 10].find((factor) => factor * power >= raw) ?? 10);
  const values = [];
  for (let tick = Math.ceil(low / step); tick * step <= high; tick += 1) values.push(Number((tick * step).toPrecision(12)));
  return values;
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
