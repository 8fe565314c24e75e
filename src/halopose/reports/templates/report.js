"use strict";
// Draws the plots from the metrics embedded in the page. Text from the data is inserted as text nodes only.
(() => {
  const metrics = JSON.parse(document.getElementById("metrics").textContent);
  const LABELS = { uncalibrated: "Uncalibrated", gaussian: "Gaussian", student_t: "Student-t" };
  const DASHES = { uncalibrated: "1.5 4", gaussian: "7 4", student_t: null, plain: null };
  const REGIMES = Object.keys(LABELS);
  const AXES = { joint: "Joint", x: "x", y: "y" };
  const names = metrics.keypoint_names;
  const scales = metrics.scales.map((scale) => scale.name);
  const state = {
    on: new Set(REGIMES), part: "all", axis: "joint", keypoint: -1, metric: "ace", sort: "given", heat: REGIMES[0],
  };
  const byId = (id) => document.getElementById(id);
  const regimes = () => REGIMES.filter((regime) => state.on.has(regime));
  const known = (value) => typeof value === "number" && Number.isFinite(value);

  // --- elements -------------------------------------------------------------------------------------
  function fill(node, attributes, children) {
    for (const [key, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined) node.setAttribute(key, value);
    }
    node.append(...children.filter((child) => child !== null));
    return node;
  }
  const html = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  const key = (regime) => html("span", { class: regime }, html("i", { class: "key", "aria-hidden": "true" }));

  // --- numbers --------------------------------------------------------------------------------------
  const minus = (text) => String(text).replace("-", "−");
  const fixed = (value, digits) => (known(value) ? minus(value.toFixed(digits)) : "–");
  const percent = (value, digits = 1) => (known(value) ? (100 * value).toFixed(digits) + "\u00a0%" : "–");
  const signif = (value) => {
    if (!known(value)) return "–";
    const size = Math.abs(value);
    return size >= 1e5 || (size > 0 && size < 1e-4) ? minus(value.toExponential(1)) : minus(Number(value.toPrecision(3)));
  };
  const plainName = (name) => name.replaceAll("_", " ");

  // --- scales: {map, ticks}; `shape` is the transform of the axis ---------------------------------------------------
  const SHAPES = { linear: (v) => v, log: Math.log, asinh: Math.asinh };
  function scale(shape, low, high, from, to) {
    const bend = SHAPES[shape];
    const span = bend(high) - bend(low) || 1;
    return (value) => from + ((bend(value) - bend(low)) / span) * (to - from);
  }
  function linearTicks(low, high, count = 5) {
    const raw = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw * 0.999) * power;
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) ticks.push(i * step);
    return ticks;
  }
  function decadeTicks(low, high, signed) {
    const top = Math.max(Math.abs(low), Math.abs(high));
    const found = [];
    const wide = Math.log10(top / (signed ? 1 : Math.max(low, 1e-12))) > 3.2;
    for (let power = signed ? 0 : Math.floor(Math.log10(low)); 10 ** power <= top; power += 1) {
      for (const factor of wide ? [1] : [1, 3]) found.push(factor * 10 ** power);
    }
    const all = signed ? [...found.map((tick) => -tick), 0, ...found] : found;
    return all.filter((tick) => tick >= low && tick <= high);
  }
  function range(values, padding = 0) {
    const good = values.filter(known);
    if (!good.length) return [0, 1];
    let low = Math.min(...good), high = Math.max(...good);
    if (low === high) { const around = Math.abs(low) * 0.1 || 0.5; low -= around; high += around; }
    return [low - padding * (high - low), high + padding * (high - low)];
  }

  // --- marks ----------------------------------------------------------------------------------------
  function mark(regime, x, y, size, extra = "") {
    const attributes = { class: `mark ${regime} ${extra}` };
    if (regime === "gaussian") return svg("rect", { ...attributes, x: x - size, y: y - size, width: 2 * size, height: 2 * size });
    if (regime === "student_t") {
      const s = size * 1.35;
      return svg("path", { ...attributes, d: `M${x} ${y - s}L${x + s} ${y}L${x} ${y + s}L${x - s} ${y}Z` });
    }
    return svg("circle", { ...attributes, cx: x, cy: y, r: size * 1.1 });
  }
  const pathOf = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

  // --- a plot of curves: axes, series, a cursor moved by pointer or arrow keys ------------------------
  let clips = 0;
  function plot(figure, spec) {
    const width = Math.max(figure.clientWidth || figure.parentNode.clientWidth, 240);
    const height = spec.height || width * 0.92;
    const box = { left: 40, right: width - 6, top: 20, bottom: height - 36 };
    const x = scale(spec.x.shape, ...spec.x.range, box.left, box.right);
    const y = scale(spec.y.shape, ...spec.y.range, box.bottom, box.top);
    const clip = `clip${(clips += 1)}`;
    const layer = svg("g", { "clip-path": `url(#${clip})` });
    const cursor = svg("g", {});
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img", "aria-label": spec.title },
      svg("clipPath", { id: clip }, svg("rect", { x: box.left - 4, y: box.top - 4, width: box.right - box.left + 8, height: box.bottom - box.top + 8 })),
      axes(spec, box, x, y), layer, cursor);
    if (spec.diagonal) {
      const [low, high] = [Math.max(spec.x.range[0], spec.y.range[0]), Math.min(spec.x.range[1], spec.y.range[1])];
      layer.append(svg("line", { class: "ideal", x1: x(low), y1: y(low), x2: x(high), y2: y(high) }));
    }
    const series = spec.series.map((one) => ({ ...one, points: pairs(one, x, y) })).filter((one) => one.points.length);
    // Equal calibrations overlap: dashes are drawn above solid lines, small marks above large ones.
    for (const one of [...series].reverse()) {
      if (spec.line !== false) layer.append(svg("path", { class: `line ${one.regime}`, "stroke-dasharray": DASHES[one.regime], d: pathOf(one.points) }));
    }
    for (const one of spec.marks ? series : []) {
      for (const [px, py] of one.points) layer.append(mark(one.regime, px, py, spec.marks * (one.regime === "gaussian" ? spec.nest || 1 : 1)));
    }
    if (known(spec.chosen)) chosenLine(root, x(spec.chosen), box, percent(spec.chosen, 0));
    figure.replaceChildren(html("figcaption", {}, spec.title), root, html("p", { class: "readout" }));
    const show = (index) => moveCursor(figure, cursor, series, box, index, spec);
    if (series.length && spec.follow !== false) follow(root, series[0].points.map((point) => point[0]), width, spec.start, show);
    if (!series.length) cursor.append(svg("text", { x: (box.left + box.right) / 2, y: (box.top + box.bottom) / 2, "text-anchor": "middle" }, "no data"));
    return show;
  }
  function pairs(one, x, y) {
    const points = [];
    one.xs.forEach((value, i) => {
      if (!known(value) || !known(one.ys[i])) return;
      const point = [x(value), y(one.ys[i]), i];
      if (Number.isFinite(point[0]) && Number.isFinite(point[1])) points.push(point);
    });
    return points;
  }
  function axes(spec, box, x, y) {
    const group = svg("g", {});
    for (const tick of spec.y.ticks) {
      group.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }),
        svg("text", { x: box.left - 6, y: y(tick) + 4, "text-anchor": "end" }, spec.y.format(tick)));
    }
    for (const tick of spec.x.ticks) {
      group.append(svg("line", { class: "grid", y1: box.top, y2: box.bottom, x1: x(tick), x2: x(tick) }),
        svg("text", { x: x(tick), y: box.bottom + 15, "text-anchor": "middle" }, spec.x.format(tick)));
    }
    group.append(svg("text", { x: box.left, y: 10 }, spec.y.label),
      svg("text", { x: box.right, y: box.bottom + 31, "text-anchor": "end" }, spec.x.label),
      svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
    return group;
  }
  function chosenLine(root, x, box, label) {
    const right = x > (box.left + box.right) / 2;
    root.append(svg("line", { class: "chosen", x1: x, x2: x, y1: box.top, y2: box.bottom }),
      svg("text", { class: "name", x: x + (right ? -5 : 5), y: box.bottom - 8, "text-anchor": right ? "end" : "start" }, `chosen: ${label}`));
  }
  // Pointer and arrow keys choose one of the positions; `show` gets its index.
  function follow(root, positions, width, start, show) {
    let index = Math.min(start ?? positions.length - 1, positions.length - 1);
    const go = (next) => { index = Math.max(0, Math.min(positions.length - 1, next)); show(index); };
    const point = (event) => {
      const at = ((event.clientX - root.getBoundingClientRect().left) / root.getBoundingClientRect().width) * width;
      let nearest = 0;
      positions.forEach((position, i) => { if (Math.abs(position - at) < Math.abs(positions[nearest] - at)) nearest = i; });
      go(nearest);
    };
    root.addEventListener("pointermove", point);
    root.addEventListener("pointerdown", point);
    root.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowUp: 1, ArrowDown: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      go(index + step);
    });
    show(index);
  }
  function moveCursor(figure, cursor, series, box, index, spec) {
    const at = series[0].points[index][0];
    const head = spec.x.read(series[0].xs[series[0].points[index][2]]);
    const line = svg("line", { class: "cursor", x1: at, x2: at, y1: box.top, y2: box.bottom });
    const items = [];
    cursor.replaceChildren(line);
    for (const one of series) {
      const nearest = one.points.reduce((best, point) => (Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best));
      const inside = nearest[1] >= box.top - 4 && nearest[1] <= box.bottom + 4;
      if (inside) cursor.append(mark(one.regime, nearest[0], nearest[1], 3.4, "at"));
      items.push(html("span", {}, one.regime === "plain" ? null : key(one.regime), html("b", {}, spec.y.read(one.ys[nearest[2]]))));
    }
    figure.querySelector(".readout").replaceChildren(html("span", {}, head), ...items);
  }

  // --- the three kinds of curves, each by axis --------------------------------------------------------
  function panels(id, make) {
    const holder = byId(id);
    Object.keys(AXES).forEach((axis, i) => {
      if (!holder.children[i]) holder.append(html("figure", {}));
      holder.children[i].classList.toggle("shown", axis === state.axis);
    });
    Object.keys(AXES).forEach((axis, i) => plot(holder.children[i], make(axis)));
  }
  const curves = (regime) => ((state.part === "all" ? metrics.curves : metrics.curves_pruned) || {})[regime] || {};

  function coverageSpec(axis) {
    const series = regimes().map((regime) => {
      const ys = (curves(regime).coverage || {})[axis] || [];
      return { regime, ys, xs: ys.map((_, i) => (i + 1) / 100) };
    });
    const side = (label) => ({ shape: "linear", range: [0, 1], ticks: [0, 0.25, 0.5, 0.75, 1], format: (v) => 100 * v, label });
    return {
      title: axis === "joint" ? "Joint: ellipse" : `${axis}: interval`, series, diagonal: true, start: 94,
      x: { ...side("nominal, %"), read: (v) => `${percent(v, 0)} region contains` },
      y: { ...side("coverage, %"), read: (v) => percent(v) },
    };
  }

  function varianceSpec(axis) {
    const root = (values) => (values || []).map((value) => (known(value) && value > 0 ? Math.sqrt(value) : null));
    const of = (regime) => (curves(regime).variance || {})[axis] || {};
    const make = (list) => list.map((regime) => ({ regime, xs: root(of(regime).predicted), ys: root(of(regime).empirical) }));
    // The range covers all regimes, so that it does not change when one is hidden.
    const values = make(REGIMES).flatMap((one) => [...one.xs, ...one.ys]).filter(known);
    const limits = values.length ? [Math.min(...values) / 1.15, Math.max(...values) * 1.15] : [0.1, 10];
    const side = (label) => ({ shape: "log", range: limits, ticks: decadeTicks(limits[0], limits[1], false), format: signif, label });
    return {
      title: AXES[axis], series: make(regimes()), diagonal: true, marks: 2.3, nest: 1.6, start: 10,
      x: { ...side("predicted, px"), read: (v) => `predicted ${signif(v)} px, error` },
      y: { ...side("error, px"), read: signif },
    };
  }

  function qqOf(regime, axis) {
    const whole = curves(regime).qq;
    const one = ((metrics.curves[regime] || {}).qq_keypoints || {})[names[state.keypoint]];
    return ((state.keypoint < 0 ? whole : one) || {})[axis] || { theoretical: [], empirical: [] };
  }
  function qqSpec(axis) {
    const bend = (values) => (axis === "joint" ? values.map((v) => (known(v) && v >= 0 ? Math.sqrt(v) : null)) : values);
    const make = (list) => list.map((regime) => {
      const { theoretical, empirical } = qqOf(regime, axis);
      return { regime, xs: bend(theoretical), ys: bend(empirical) };
    });
    const all = make(REGIMES);
    const top = Math.max(1, ...all.flatMap((one) => [...one.xs, ...one.ys]).filter(known).map(Math.abs)) * 1.1;
    const limits = axis === "joint" ? [0, top] : [-top, top];
    const side = (label) => ({ shape: "asinh", range: limits, ticks: decadeTicks(limits[0], limits[1], true), format: signif, label });
    return {
      title: axis === "joint" ? "Joint: distance" : `${axis}: standardised`, series: make(regimes()), diagonal: true, marks: 1.7, line: false,
      x: { ...side("quantile of the distribution"), read: (v) => `expected ${signif(v)}, residuals` },
      y: { ...side("quantile of the residuals"), read: signif },
    };
  }
  function drawQq() {
    const student = REGIMES.filter((regime) => metrics.curves[regime] && !metrics.curves[regime].qq).map((regime) => LABELS[regime]);
    let note = "";
    if (state.keypoint < 0 && student.length) note = `${student.join(", ")}: degrees of freedom differ by keypoint, choose one to see it.`;
    if (state.keypoint >= 0 && state.part === "pruned") note = "A single keypoint is shown before pruning.";
    byId("qq-note").textContent = note;
    panels("qq", qqSpec);
  }

  // --- bars by keypoint and by scale ------------------------------------------------------------------
  const block = (regime) => (state.part === "all" ? metrics[regime] : metrics.pruned[regime]) || {};
  const METRIC_LABELS = { ace: "ACE", ence: "ENCE", nll: "NLL", akp: "AKP" };

  function bars(holder, group, labels) {
    const at = (regime, name) => ((block(regime)[group] || {})[name] || {})[state.metric];
    const rows = labels.map((name) => ({ name, values: regimes().map((regime) => at(regime, name)) }));
    if (state.sort === "worst" && group === "per_keypoint") {
      const sign = state.metric === "akp" ? 1 : -1;
      const value = (row) => (known(row.values[0]) ? sign * row.values[0] : Infinity);
      rows.sort((a, b) => value(a) - value(b) || 0);
    }
    // Bars start at zero for errors only; NLL and AKP are points on their own range.
    const asBars = state.metric === "ace" || state.metric === "ence";
    const every = labels.flatMap((name) => REGIMES.map((regime) => at(regime, name)));
    const limits = asBars ? [0, Math.max(...every.filter(known), 1e-6) * 1.04] : range(every, 0.06);
    drawBars(holder, rows, limits, asBars);
  }
  function drawBars(holder, rows, limits, asBars) {
    const width = Math.max(holder.clientWidth, 260);
    const longest = Math.max(...rows.map((row) => plainName(row.name).length));
    const left = Math.min(longest * 7.3 + 14, width * 0.38);
    const fits = Math.floor((left - 14) / 7.3);
    const pitch = asBars ? Math.max(regimes().length * 6 + 9, 20) : 24;
    const bottom = 8 + rows.length * pitch;
    const x = scale("linear", ...limits, left, width - 10);
    const root = svg("svg", { viewBox: `0 0 ${width} ${bottom + 22}`, tabindex: 0, role: "img", "aria-label": `${METRIC_LABELS[state.metric]} by row` });
    for (const tick of linearTicks(...limits, Math.max(3, Math.round((width - left) / 90)))) {
      root.append(svg("line", { class: "grid", x1: x(tick), x2: x(tick), y1: 4, y2: bottom }),
        svg("text", { x: x(tick), y: bottom + 16, "text-anchor": "middle" }, signif(tick)));
    }
    const strips = rows.map((row, i) => barRow(root, row, i, { x, left, width, pitch, fits, asBars }));
    holder.replaceChildren(root, html("p", { class: "readout" }));
    followRows(root, strips, (i) => {
      const items = regimes().map((regime, r) => html("span", {}, key(regime), html("b", {}, fixed(rows[i].values[r], 4))));
      holder.querySelector(".readout").replaceChildren(html("span", {}, plainName(rows[i].name)), ...items);
    });
  }
  function barRow(root, row, i, { x, left, width, pitch, fits, asBars }) {
    const top = 4 + i * pitch, middle = top + pitch / 2;
    const label = plainName(row.name);
    const strip = svg("rect", { class: "row", x: 0, y: top, width, height: pitch });
    root.append(strip, svg("text", { class: "name", x: left - 8, y: middle + 4, "text-anchor": "end" }, label.length > fits ? label.slice(0, Math.max(fits - 1, 1)) + "…" : label));
    const shown = regimes();
    if (!row.values.some(known)) root.append(svg("text", { x: left + 6, y: middle + 4 }, "no samples"));
    if (!asBars && row.values.some(known)) root.append(svg("line", { class: "axis", x1: left, x2: width - 10, y1: middle, y2: middle }));
    row.values.forEach((value, r) => {
      if (!known(value)) return;
      if (!asBars) return root.append(mark(shown[r], x(value), middle, 4));
      const y = middle - shown.length * 3 + r * 6;
      root.append(svg("rect", { class: `bar ${shown[r]}`, x: left, y: y + 0.5, width: Math.max(x(value) - left, 1), height: 5, rx: 1 }));
    });
    return strip;
  }
  function followRows(root, strips, read) {
    let index = 0;
    const go = (next) => {
      if (!strips.length) return;
      strips[index].classList.remove("at");
      index = Math.max(0, Math.min(strips.length - 1, next));
      strips[index].classList.add("at");
      read(index);
    };
    const point = (event) => {
      const found = strips.findIndex((strip) => event.clientY < strip.getBoundingClientRect().bottom);
      if (found >= 0) go(found);
    };
    root.addEventListener("pointermove", point);
    root.addEventListener("pointerdown", point);
    root.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      go(index + step);
    });
    if (strips.length) read(0);
  }

  // --- heat map ---------------------------------------------------------------------------------------
  function drawHeat() {
    const held = (metrics.cells[state.heat] || {})["95"] || [];
    const head = html("tr", {}, html("td", {}), ...scales.map((name) => html("th", { scope: "col" }, name)));
    const rows = names.map((name, k) => html("tr", {}, html("th", { scope: "row" }, plainName(name)),
      ...scales.map((scaleName, s) => heatCell((held[k] || [])[s], ((metrics.cells.count || [])[k] || [])[s] || 0))));
    byId("heat").replaceChildren(html("table", { class: "heat" }, html("thead", {}, head), html("tbody", {}, ...rows)));
  }
  function heatCell(value, count) {
    if (!known(value)) return html("td", { class: "few", title: "no samples" }, "·");
    const points = 100 * value - 95;
    // Square root, so that small deviations are visible beside large ones.
    const strength = Math.min(Math.sqrt(Math.abs(points) / 25), 1) * 0.72;
    const text = (points > 0 ? "+" : "") + minus(points.toFixed(1));
    const style = `background:color-mix(in srgb, var(--${points < 0 ? "over" : "under"}) ${(100 * strength).toFixed(1)}%, transparent)`;
    return html("td", { class: count < 100 ? "few" : null, style, title: `contains ${percent(value)} of ${count} keypoints` }, text);
  }

  // --- pruning ----------------------------------------------------------------------------------------
  function pruningPlots() {
    const curve = metrics.pruning_curve || {};
    const kept = curve.kept || [];
    // The mean over few keypoints is too noisy to set the scale.
    const settled = (values) => (values || []).filter((_, i) => kept[i] >= 0.03 || kept.length < 20);
    const chosen = metrics.pruned.kept_fraction;
    const xAxis = { shape: "linear", range: [0, 1], ticks: [0, 0.25, 0.5, 0.75, 1], format: (v) => 100 * v, label: "kept, %", read: (v) => `${percent(v, 0)} kept` };
    const make = (title, values, format, label, read) => {
      const limits = range(settled(values), 0.08);
      return { title, series: [{ regime: "plain", xs: kept, ys: values || [] }], chosen, follow: false, height: 260,
        x: xAxis, y: { shape: "linear", range: limits, ticks: linearTicks(...limits, 5), format, label, read } };
    };
    const holder = byId("pruning");
    while (holder.children.length < 2) holder.append(html("figure", {}));
    return [
      plot(holder.children[0], make("Reliability", curve.reliability, (v) => signif(100 * v), "reliable, %", (v) => percent(v))),
      plot(holder.children[1], make("NLL, Gaussian", curve.nll, signif, "NLL", (v) => fixed(v, 3))),
    ];
  }
  function drawPruning() {
    const curve = metrics.pruning_curve || {};
    const kept = curve.kept || [];
    const shows = pruningPlots();
    const slider = byId("kept");
    const read = () => {
      const i = Number(slider.value);
      if (!kept.length) { byId("pruning-readout").textContent = "No pruning curve."; return; }
      const bold = (text) => html("b", {}, text);
      byId("pruning-readout").replaceChildren("Keep ", bold(percent(kept[i], 0)), ": ", bold(percent(curve.reliability[i])), " reliable, NLL ",
        bold(fixed(curve.nll[i], 3)), ", threshold ", bold(signif(curve.threshold[i])));
      slider.setAttribute("aria-valuetext", `${percent(kept[i], 0)} kept`);
      // A curve may lack a point.
      shows.forEach((show, which) => { if (known([curve.reliability, curve.nll][which][i])) show(indexAmongKnown([curve.reliability, curve.nll][which], i)); });
    };
    slider.oninput = read;
    read();
  }
  const indexAmongKnown = (values, i) => values.slice(0, i).filter(known).length;

  // --- controls ---------------------------------------------------------------------------------------
  function segmented(id, options, field, then) {
    const holder = byId(id);
    for (const [value, label] of Object.entries(options)) {
      const button = html("button", { type: "button", "aria-pressed": state[field] === value }, label);
      button.addEventListener("click", () => {
        state[field] = value;
        for (const other of holder.children) other.setAttribute("aria-pressed", other === button);
        then();
      });
      holder.append(button);
    }
  }
  function regimeToggles() {
    for (const regime of REGIMES) {
      const button = html("button", { type: "button", "aria-pressed": true }, key(regime), LABELS[regime]);
      button.addEventListener("click", () => {
        // At least one stays on.
        if (state.on.has(regime) && state.on.size === 1) return;
        if (!state.on.delete(regime)) state.on.add(regime);
        button.setAttribute("aria-pressed", state.on.has(regime));
        draw();
      });
      byId("regimes").append(button);
    }
  }
  function keypointSelect() {
    const ace = (name) => ((metrics.uncalibrated.per_keypoint || {})[name] || {}).ace;
    const shown = names.map((name, k) => k).filter((k) => ((metrics.curves.gaussian || {}).qq_keypoints || {})[names[k]]);
    const select = byId("qq-keypoint");
    select.append(html("option", { value: -1 }, "all keypoints"), ...shown.map((k) => html("option", { value: k }, plainName(names[k]))));
    // Start with the worst calibrated keypoint: the distributions differ most there, and all three can be shown.
    state.keypoint = shown.reduce((worst, k) => (worst < 0 || ace(names[k]) > ace(names[worst]) ? k : worst), -1);
    select.value = state.keypoint;
    select.addEventListener("change", () => { state.keypoint = Number(select.value); drawQq(); });
  }
  function drawBarsOfBoth() {
    bars(byId("by-keypoint"), "per_keypoint", names);
    bars(byId("by-scale"), "per_scale", scales);
  }
  function drawCurves() { panels("coverage", coverageSpec); panels("variance", varianceSpec); drawQq(); }
  function draw() { drawCurves(); drawBarsOfBoth(); drawHeat(); drawPruning(); }

  byId("plots").hidden = false;
  document.body.classList.toggle("many", names.length > 40);
  regimeToggles();
  segmented("part", { all: "All keypoints", pruned: "After pruning" }, "part", draw);
  segmented("axis", { joint: "Joint", x: "x", y: "y" }, "axis", drawCurves);
  segmented("metric", METRIC_LABELS, "metric", drawBarsOfBoth);
  segmented("sort", { given: "As listed", worst: "Worst first" }, "sort", drawBarsOfBoth);
  segmented("heat-regime", LABELS, "heat", drawHeat);
  keypointSelect();
  const kept = (metrics.pruning_curve || {}).kept || [];
  const nearest = kept.reduce((best, value, i) => (Math.abs(value - metrics.pruned.kept_fraction) < Math.abs(kept[best] - metrics.pruned.kept_fraction) ? i : best), 0);
  byId("kept").max = Math.max(kept.length - 1, 0);
  byId("kept").value = nearest;
  draw();
  let width = document.body.clientWidth;
  addEventListener("resize", () => { if (document.body.clientWidth !== width) { width = document.body.clientWidth; draw(); } });
  addEventListener("beforeprint", () => { for (const details of document.querySelectorAll("details")) details.open = true; });
})();
