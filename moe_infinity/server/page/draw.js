// What is drawn: the map of the experts, and lines over time.

const CELL = 8; // pixels of a cell and the gap behind it
const FLASH_MS = 600;
const NAMES = { d: "device", h: "host", l: "loading", ".": "disk" };
const isCalm = matchMedia("(prefers-reduced-motion: reduce)");

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

export class ExpertMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.brush = canvas.getContext("2d");
    this.rows = [];
    this.drawn = []; // the name of each cell's colour
  }

  // Rows of letters, as /stats has them: a capital was just used.
  show(rows) {
    const before = this.rows;
    this.rows = rows;
    const names = rows.map((row, y) => [...row].map((letter, x) => {
      const isFresh = "dh".includes(letter) && ".l".includes(before[y]?.[x] ?? "h");
      if (isFresh) return "fresh";
      return NAMES[letter] ?? (letter === " " ? null : "used");
    }));
    this.paint(names);
    clearTimeout(this.calming);
    if (!isCalm.matches) this.calming = setTimeout(() => this.calm(), FLASH_MS);
  }

  // Without what was just used or loaded.
  calm() {
    this.paint(this.rows.map((row) => [...row.toLowerCase()].map((letter) => NAMES[letter] ?? null)));
  }

  // Draw only the cells that have changed.
  paint(names) {
    const width = CELL * Math.max(1, ...names.map((row) => row.length));
    const height = CELL * names.length;
    if (this.canvas.width !== width || this.canvas.height !== height) {
      this.canvas.width = width;
      this.canvas.height = height;
      this.drawn = [];
    }
    const colors = Object.fromEntries(["used", "fresh", ...Object.values(NAMES)].map((n) => [n, color(n)]));
    names.forEach((row, y) => row.forEach((name, x) => {
      if (name === null || this.drawn[y]?.[x] === name) return;
      this.brush.fillStyle = colors[name];
      this.brush.fillRect(x * CELL, y * CELL, CELL - 1, CELL - 1);
    }));
    this.drawn = names;
  }

  // With the colours of another scheme.
  repaint() {
    this.drawn = [];
    this.calm();
  }

  text() {
    const letters = this.rows.join("");
    const count = (kind) => [...letters].filter((letter) => kind.includes(letter)).length;
    const wide = Math.max(0, ...this.rows.map((row) => row.length));
    const device = count("dD");
    return `${this.rows.length} layers (down) of ${wide} experts (across): ` +
      `${count("DH")} just used, ${device ? `${device} in device memory, ` : ""}` +
      `${count("hH")} in host memory, ${count("l")} loading, ${count(".")} on disk only`;
  }
}

// A line of up to `places` values; null leaves a gap.
export function drawLine(canvas, values, top, places) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.width = canvas.clientWidth * ratio;
  const height = canvas.height = canvas.clientHeight * ratio;
  const brush = canvas.getContext("2d");
  brush.strokeStyle = color("line");
  brush.strokeRect(0, 0, width, height);
  brush.strokeStyle = color("accent");
  brush.lineWidth = 2 * ratio;
  brush.beginPath();
  let isDown = false;
  values.forEach((value, i) => {
    if (value === null) {
      isDown = false;
      return;
    }
    const x = (i + places - values.length) / (places - 1) * width;
    const y = height - 2 * ratio - value / top * (height - 4 * ratio);
    if (isDown) brush.lineTo(x, y);
    else brush.moveTo(x - 2 * ratio, y), brush.lineTo(x, y);
    isDown = true;
  });
  brush.stroke();
}
