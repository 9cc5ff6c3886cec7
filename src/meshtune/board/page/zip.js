// A zip of files without compression, so that a folder is sent as one upload.

const CRC = Uint32Array.from({ length: 256 }, (_, n) => {
  let value = n;
  for (let bit = 0; bit < 8; bit += 1) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value;
});
const UTF8 = 0x0800; // names are UTF-8
const [LOCAL, CENTRAL, END] = [0x04034b50, 0x02014b50, 0x06054b50];

// `files` are [{ name, file }] with a path as name; a file has arrayBuffer(), as those of browsers.
export async function zipOf(files) {
  const parts = [];
  const directory = [];
  let offset = 0;
  for (const { name, file } of files) {
    const path = new TextEncoder().encode(name);
    const content = new Uint8Array(await file.arrayBuffer());
    // Version 2.0, flags, no compression, no time, then the numbers that both headers have.
    const common = [[20, 2], [UTF8, 2], [0, 2], [0, 4], [crc(content), 4], [content.length, 4], [content.length, 4], [path.length, 2], [0, 2]];
    parts.push(bytes([[LOCAL, 4], ...common]), path, content);
    directory.push(bytes([[CENTRAL, 4], [20, 2], ...common, [0, 2], [0, 2], [0, 2], [0, 4], [offset, 4]]), path);
    offset += 30 + path.length + content.length;
  }
  const size = directory.reduce((sum, part) => sum + part.length, 0);
  const end = bytes([[END, 4], [0, 2], [0, 2], [files.length, 2], [files.length, 2], [size, 4], [offset, 4], [0, 2]]);
  return new Blob([...parts, ...directory, end], { type: 'application/zip' });
}

function crc(content) {
  let value = 0xffffffff;
  for (const byte of content) value = (value >>> 8) ^ CRC[(value ^ byte) & 0xff];
  return (value ^ 0xffffffff) >>> 0;
}

// Numbers of 2 or 4 bytes, the lowest first.
function bytes(numbers) {
  const list = numbers.flatMap(([value, width]) => Array.from({ length: width }, (_, n) => (value / 2 ** (8 * n)) & 0xff));
  return Uint8Array.from(list);
}
