"use strict";
for (const svg of document.querySelectorAll(".maps svg")) {
  svg.addEventListener("pointermove", (event) => {
    if (event.target.tagName !== "rect") return;
    const size = Number(svg.dataset.size), square = event.target;
    const labels = svg.closest(".maps").querySelectorAll(".labels div[title]");
    const step = Math.round(Number(square.getAttribute("x")) / size) + 1;
    const path = labels[Math.round(Number(square.getAttribute("y")) / 14)].title;
    const where = Number(svg.dataset.steps) > 1 ? `, step ${step}` : "";
    $("readout").textContent = `${svg.previousElementSibling ? svg.previousElementSibling.textContent : ""} · ${path}${where}: ${square.dataset.b} bits`;
  });
}
