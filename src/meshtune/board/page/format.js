// Numbers as people read them, in the page's language.

import { language, t } from './text.js';

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return new Intl.NumberFormat(language, { maximumSignificantDigits: Math.max(digits, String(Math.trunc(size)).length) }).format(value);
}

export function bytes(value) {
  if (!value) return '–';
  const { name, size } = byteUnit(value);
  return `${number(value / size, 3)} ${name}`;
}

// The unit for a number of bytes: {name, size}.
export function byteUnit(value) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  const power = Math.min(units.length - 1, Math.floor(Math.log2(Math.max(1, value)) / 10));
  return { name: units[power], size: 1024 ** power };
}

export const percent = (share) => new Intl.NumberFormat(language, { style: 'percent', maximumFractionDigits: 0 }).format(share);

// Seconds as hours, minutes and seconds; what a jump of a clock made negative is nothing.
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !(seconds >= 0)) return '–';
  const whole = Math.round(seconds);
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
  if (hours) return t('unit.hours', { hours, minutes });
  return minutes ? t('unit.minutes', { minutes, seconds: whole % 60 }) : t('unit.seconds', { seconds: whole });
}

// A moment, given as ISO text.
export function moment(text) {
  const date = new Date(text);
  if (Number.isNaN(date.getTime())) return '–';
  return new Intl.DateTimeFormat(language, { dateStyle: 'short', timeStyle: 'medium' }).format(date);
}
