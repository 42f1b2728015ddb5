"use strict";
(() => {
  const rows = document.querySelectorAll("script.row"); // each is read when it is shown
  const $ = (id) => document.getElementById(id);
  const words = { reference: "reference", same: "same picture", other: "different picture", broken: "broken", failed: "did not run" };
  const badness = { same: 1, other: 2, broken: 3 };
  const signs = { reference: "◎", same: "✓", other: "≠", broken: "✕", failed: "—" };
  const state = { row: 0, cells: [], frame: -1, frames: 1, timer: 0, pictures: new Map(), turn: 0 };

  // A sheet becomes a picture without any request: bytes, blob, bitmap.
  const decode = async (sheet) => {
    const bytes = Uint8Array.from(atob(sheet.data), (sign) => sign.charCodeAt(0));
    return createImageBitmap(new Blob([bytes], { type: sheet.mime }));
  };
  // magma at nine places, between them straight lines
  const stops = [[0, 0, 4], [28, 16, 68], [79, 18, 123], [129, 37, 129], [181, 54, 122], [229, 80, 100], [251, 135, 97], [254, 194, 135], [252, 253, 191]];
  const magma = Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2), part = at - low;
    return stops[low].map((value, k) => value + part * (stops[low + 1][k] - value));
  });

  const place = (sheet, frame) => {
    const index = Math.min(Math.floor(frame / sheet.every), sheet.frames - 1);
    return [(index % sheet.columns) * sheet.width, Math.floor(index / sheet.columns) * sheet.height, sheet.width, sheet.height];
  };
  const fit = (canvas, sheet) => {
    if (canvas.width !== sheet.width || canvas.height !== sheet.height) { canvas.width = sheet.width; canvas.height = sheet.height; }
  };
  const draw = (canvas, name, clip) => {
    const found = state.pictures.get(name);
    if (!found || !found.bitmap) return;
    const at = place(found.sheet, state.frame), context = canvas.getContext("2d");
    if (!clip) fit(canvas, found.sheet);
    context.save();
    if (clip) { context.beginPath(); context.rect(...clip); context.clip(); }
    context.drawImage(found.bitmap, ...at, 0, 0, canvas.width, canvas.height);
    context.restore();
  };

  const drawWipe = () => {
    const canvas = $("wipe"), left = state.pictures.get($("left").value), right = state.pictures.get($("right").value);
    const one = left || right;
    if (!one) { canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height); return; }
    const scale = Math.max(1, Math.round(480 / one.sheet.width));
    const width = one.sheet.width * scale, height = one.sheet.height * scale;
    if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    const x = Math.round((canvas.width * $("divide").value) / 1000);
    draw(canvas, $("left").value, [0, 0, x, canvas.height]);
    draw(canvas, $("right").value, [x, 0, canvas.width - x, canvas.height]);
    context.fillStyle = "#fff"; context.fillRect(x - 1, 0, 2, canvas.height);
    context.fillStyle = "rgba(0,0,0,.55)"; context.fillRect(x - 2, 0, 1, canvas.height); context.fillRect(x + 1, 0, 1, canvas.height);
  };
  const drawMap = () => {
    const canvas = $("map"), found = state.pictures.get("difference:" + $("mapped").value);
    const context = canvas.getContext("2d", { willReadFrequently: true });
    const cell = state.cells.find((other) => other.name === $("mapped").value);
    $("mapsaid").textContent = !cell ? "" : found ? cell.said : cell.verdict === "reference" ? "This is the reference." : "There is no map.";
    if (!found) { context.fillStyle = "#000"; context.fillRect(0, 0, canvas.width, canvas.height); return; }
    fit(canvas, found.sheet);
    context.drawImage(found.bitmap, ...place(found.sheet, state.frame), 0, 0, canvas.width, canvas.height);
    const gain = $("gain").getAttribute("aria-pressed") === "true" ? 8 : 1;
    const pixels = context.getImageData(0, 0, canvas.width, canvas.height);
    for (let i = 0; i < pixels.data.length; i += 4) {
      const [red, green, blue] = magma[Math.min(255, pixels.data[i] * gain)];
      pixels.data[i] = red; pixels.data[i + 1] = green; pixels.data[i + 2] = blue;
    }
    context.putImageData(pixels, 0, 0);
  };
  const show = () => {
    for (const canvas of $("tiles").querySelectorAll("canvas")) draw(canvas, canvas.dataset.name);
    drawWipe(); drawMap();
    $("seek").value = state.frame;
    $("count").textContent = `${state.frame + 1} of ${state.frames}`;
  };

  const element = (kind, text, name) => {
    const made = document.createElement(kind);
    if (text) made.textContent = text;
    if (name) made.className = name;
    return made;
  };
  const buildTile = (cell) => {
    const tile = element("div", "", "tile");
    tile.title = cell.reason;
    if (cell.frames) {
      const canvas = element("canvas");
      canvas.dataset.name = cell.name;
      canvas.width = cell.frames.width; canvas.height = cell.frames.height;
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${cell.name}: ${words[cell.verdict]}. ${cell.reason}`);
      tile.append(canvas);
    } else tile.append(element("div", cell.reason.slice(0, 160), "empty"));
    const name = element("div", "", "name");
    name.append(element("span", cell.name), element("span", cell.said, "said"));
    const badge = element("span", "", "badge " + cell.verdict);
    badge.append(element("span", signs[cell.verdict]), document.createTextNode(words[cell.verdict]));
    badge.firstChild.setAttribute("aria-hidden", "true");
    tile.append(name, badge);
    return tile;
  };
  const fill = (select, names, wanted) => {
    const chosen = names.includes(select.value) ? select.value : wanted;
    select.replaceChildren(...names.map((name) => element("option", name)));
    if (chosen) select.value = chosen;
  };

  const open = async (index) => {
    const turn = ++state.turn;
    state.row = index;
    $("prompt").value = index;
    $("before").disabled = index === 0; $("after").disabled = index === rows.length - 1;
    const row = JSON.parse(rows[index].textContent), pictured = row.cells.filter((cell) => cell.frames);
    state.cells = row.cells;
    $("tiles").replaceChildren(...row.cells.map(buildTile));
    const names = pictured.map((cell) => cell.name);
    const others = names.filter((name) => name !== row.reference);
    // the pair that says most: the reference against the worst; and the map of the best, which is not empty
    const ranked = pictured.filter((cell) => others.includes(cell.name)).sort((a, b) => badness[b.verdict] - badness[a.verdict]);
    const best = ranked.filter((cell) => cell.difference && cell.verdict === "same").pop();
    fill($("left"), names, row.reference); fill($("right"), names, ranked.length ? ranked[0].name : row.reference);
    fill($("mapped"), others, best ? best.name : others[0]);
    nameEnds();
    const wanted = [];
    for (const cell of pictured) {
      wanted.push([cell.name, cell.frames]);
      if (cell.difference) wanted.push(["difference:" + cell.name, cell.difference]);
    }
    const decoded = await Promise.all(wanted.map(async ([name, sheet]) => [name, { sheet, bitmap: await decode(sheet) }]));
    if (turn !== state.turn) return; // another prompt was chosen meanwhile
    for (const found of state.pictures.values()) found.bitmap.close();
    state.pictures = new Map(decoded);
    state.frames = Math.max(1, ...pictured.map((cell) => (cell.frames.frames - 1) * cell.frames.every + 1));
    state.frame = state.frame < 0 ? Math.floor(state.frames / 2) : Math.min(state.frame, state.frames - 1);
    $("seek").max = state.frames - 1;
    $("play").disabled = state.frames < 2;
    $("viewer").classList.toggle("pixelated", pictured.some((cell) => cell.frames.width < 200));
    document.body.dataset.ready = String(index);
    show();
  };
  const nameEnds = () => { $("leftname").textContent = $("left").value; $("rightname").textContent = $("right").value; };
  const go = (frame) => { state.frame = (frame + state.frames) % state.frames; show(); };
  const play = (wanted) => {
    clearInterval(state.timer);
    state.timer = wanted ? setInterval(() => go(state.frame + 1), 125) : 0;
    $("play").setAttribute("aria-pressed", String(wanted));
    $("play").textContent = wanted ? "❚❚ Pause" : "▶ Play";
  };
  const isPlaying = () => state.timer !== 0;

  $("prompt").addEventListener("change", (event) => open(Number(event.target.value)));
  $("before").addEventListener("click", () => state.row > 0 && open(state.row - 1));
  $("after").addEventListener("click", () => state.row < rows.length - 1 && open(state.row + 1));
  $("play").addEventListener("click", () => play(!isPlaying()));
  $("seek").addEventListener("input", (event) => { play(false); go(Number(event.target.value)); });
  $("divide").addEventListener("input", drawWipe);
  for (const id of ["left", "right"]) $(id).addEventListener("change", () => { nameEnds(); drawWipe(); });
  $("mapped").addEventListener("change", drawMap);
  $("gain").addEventListener("click", () => {
    const on = $("gain").getAttribute("aria-pressed") !== "true";
    $("gain").setAttribute("aria-pressed", String(on));
    $("most").textContent = on ? "0.125" : "1";
    drawMap();
  });
  const drag = (event) => {
    const box = $("wipe").getBoundingClientRect();
    $("divide").value = Math.round((1000 * (event.clientX - box.left)) / box.width);
    drawWipe();
  };
  $("wipe").addEventListener("pointerdown", (event) => { $("wipe").setPointerCapture(event.pointerId); drag(event); });
  $("wipe").addEventListener("pointermove", (event) => event.buttons && drag(event));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const kind = event.target.tagName;
    const steps = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key === " " && !["BUTTON", "SUMMARY", "SELECT"].includes(kind)) { event.preventDefault(); play(!isPlaying()); }
    else if (steps[event.key] && !["INPUT", "SELECT"].includes(kind)) { event.preventDefault(); play(false); go(state.frame + steps[event.key]); }
    else if (event.key === "[" && state.row > 0) open(state.row - 1);
    else if (event.key === "]" && state.row < rows.length - 1) open(state.row + 1);
  });
  if (rows.length) open(0);
})();
