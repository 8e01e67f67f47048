// What is drawn: the map of the experts, and lines over time.

const CELL = 8; // pixels of a cell and the gap behind it
const NAMES = { d: "device", h: "host", l: "fresh", ".": "disk" };

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

// By the fastest memory that holds an expert, from the rows of /stats; "disk" is in none.
export function countExperts(rows) {
  const letters = [...rows.join("").toLowerCase()];
  const count = (kinds) => letters.filter((letter) => kinds.includes(letter)).length;
  return { device: count("d"), host: count("h"), disk: count(".l") };
}

export class ExpertMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.brush = canvas.getContext("2d");
    this.rows = [];
    this.drawn = []; // the name of each cell's color
  }

  // Rows of letters, as /stats has them: a capital was used by the last step. `isBusy`: there was a
  // step since the last call; otherwise what that one used or loaded is marked no more.
  show(rows, isBusy) {
    const before = this.rows;
    this.rows = rows;
    this.paint(rows.map((row, y) => [...row].map((letter, x) => {
      const isUsed = isBusy && "DH".includes(letter);
      const isFresh = isBusy && "dh".includes(letter) && ".l".includes(before[y]?.[x] ?? "h");
      return isUsed ? "used" : isFresh ? "fresh" : NAMES[letter.toLowerCase()] ?? null;
    })));
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
    const colors = Object.fromEntries(["used", ...Object.values(NAMES)].map((n) => [n, color(n)]));
    names.forEach((row, y) => row.forEach((name, x) => {
      if (name === null || this.drawn[y]?.[x] === name) return;
      this.brush.fillStyle = colors[name];
      this.brush.fillRect(x * CELL, y * CELL, CELL - 1, CELL - 1);
    }));
    this.drawn = names;
  }

  // With the colors of another scheme.
  repaint() {
    const names = this.drawn;
    this.drawn = [];
    this.paint(names);
  }

  text() {
    const { device, host, disk } = countExperts(this.rows);
    const wide = Math.max(0, ...this.rows.map((row) => row.length));
    return `${this.rows.length} layers (down) of ${wide} experts (across): ` +
      `${device ? `${device} in device memory, ` : ""}${host} in host memory, ${disk} on disk only`;
  }
}

// A line through [time in ms, value], over the `seconds` before `now`; null leaves a gap.
export function drawLine(canvas, points, { top, now, seconds }) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.width = canvas.clientWidth * ratio;
  const height = canvas.height = canvas.clientHeight * ratio;
  const brush = canvas.getContext("2d");
  brush.strokeStyle = color("line");
  brush.lineWidth = ratio;
  for (const y of [0.5, height / 2, height - 0.5]) {
    brush.beginPath();
    brush.moveTo(0, y);
    brush.lineTo(width, y);
    brush.stroke();
  }
  brush.strokeStyle = color("accent");
  brush.lineWidth = 2 * ratio;
  brush.lineJoin = "round";
  brush.beginPath();
  let isDown = false;
  for (const [time, value] of points) {
    const x = width * (1 - (now - time) / 1000 / seconds);
    if (value !== null) {
      const y = height - ratio - value / top * (height - 2 * ratio);
      if (isDown) brush.lineTo(x, y);
      else brush.moveTo(x - 2 * ratio, y), brush.lineTo(x, y);
    }
    isDown = value !== null;
  }
  brush.stroke();
}
