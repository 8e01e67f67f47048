// Numbers as text, and text into elements.

export function bytes(number) {
  let i = 0;
  for (; number >= 1024 && i < 4; i++) number /= 1024;
  return `${number.toFixed(i ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][i]}`;
}

export function percent(share) {
  return `${Number((100 * share).toFixed(1))} %`;
}

export function count(number) {
  return number.toLocaleString("en");
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
