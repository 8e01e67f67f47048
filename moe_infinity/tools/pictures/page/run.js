"use strict";
// The cell under the pointer, or the one that the arrow keys move to, is named below its picture.
const data = JSON.parse(document.getElementById("data").textContent);
const STATES = {
  0: "on disk only", 1: "being loaded", 2: "in memory", 3: "in memory, used by the last token",
  4: "in host memory, not on the device",
};

function textOf(picture, layer, expert) {
  const name = picture.dataset.map;
  if (name === undefined) return picture.querySelectorAll("g")[expert].dataset.text;
  const where = `MoE layer ${layer}, expert ${expert}: `;
  if (name === "states") return where + (STATES[data.states[layer][expert]] ?? "no such expert");
  const rows = data.maps[name][layer];
  const total = rows.reduce((sum, count) => sum + count, 0);
  const count = rows[expert];
  return `${where}${count} tokens, ${(100 * count / Math.max(total, 1)).toFixed(1)} % of its layer's activations`;
}

for (const picture of document.querySelectorAll(".map, .steps")) {
  const { width, height } = picture.viewBox.baseVal;
  const rows = picture.dataset.map === undefined ? 1 : height;
  const mark = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  const below = picture.nextElementSibling;
  let column = 0, row = 0;
  mark.setAttribute("class", "mark");
  mark.setAttribute("width", 1);
  mark.setAttribute("height", height / rows);

  const show = () => {
    column = Math.min(Math.max(column, 0), width - 1);
    row = Math.min(Math.max(row, 0), rows - 1);
    mark.setAttribute("x", column);
    mark.setAttribute("y", row * height / rows);
    picture.append(mark);
    below.textContent = textOf(picture, row, column);
  };
  const point = (event) => {
    const box = picture.getBoundingClientRect();
    column = Math.floor((event.clientX - box.left) / box.width * width);
    row = Math.floor((event.clientY - box.top) / box.height * rows);
    show();
  };
  picture.addEventListener("pointermove", point);
  picture.addEventListener("pointerdown", point);
  picture.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const move = moves[event.key];
    if (move === undefined) return;
    event.preventDefault();
    column += move[0];
    row += move[1];
    show();
  });
}
