"use strict";

// Theme: the reader's system decides until the button is pressed; nothing is stored.
{
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const say = () => {
    button.textContent = isDark() ? "☀ Light" : "☾ Dark";
    button.setAttribute("aria-label", `Switch to the ${isDark() ? "light" : "dark"} theme`);
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    say();
  });
  system.addEventListener("change", say);
  say();
  button.hidden = false;
}

// Details of a cell: the browser opens them on click, tap and Enter; here they get their place, and open on hover, too.
{
  let timer = 0;
  let pinned = null;
  const place = (button, box) => {
    const at = button.getBoundingClientRect();
    box.classList.add("placed");
    const gap = 6;
    const below = at.bottom + gap;
    const fits = below + box.offsetHeight <= innerHeight - gap;
    const top = fits ? below : Math.max(gap, at.top - gap - box.offsetHeight);
    box.style.top = `${top}px`;
    box.style.left = `${Math.max(gap, Math.min(at.left, document.documentElement.clientWidth - box.offsetWidth - gap))}px`;
  };
  for (const button of document.querySelectorAll("[popovertarget]")) {
    const box = document.getElementById(button.getAttribute("popovertarget"));
    const isOpen = () => box.matches(":popover-open");
    box.addEventListener("toggle", (event) => {
      if (event.newState === "open") place(button, box);
      else if (pinned === box) pinned = null;
    });
    button.addEventListener("click", (event) => {
      clearTimeout(timer);
      if (isOpen() && pinned !== box) event.preventDefault(); // opened by hovering: the click keeps it
      pinned = isOpen() && pinned === box ? null : box;
    });
    button.addEventListener("pointerenter", (event) => {
      if (event.pointerType !== "mouse" || pinned) return;
      clearTimeout(timer);
      timer = setTimeout(() => isOpen() || box.showPopover(), 250);
    });
    const leave = () => {
      clearTimeout(timer);
      timer = setTimeout(() => isOpen() && pinned !== box && box.hidePopover(), 150); // time to move into the box
    };
    button.addEventListener("pointerleave", leave);
    box.addEventListener("pointerleave", leave);
    box.addEventListener("pointerenter", () => clearTimeout(timer));
  }

  // An address that ends in a cell's anchor opens the cell; in a config's, the config, which details may cover.
  const open = () => {
    const button = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (button?.matches("details")) {
      document.querySelector(":popover-open")?.hidePopover();
      button.open = true;
      button.scrollIntoView();
    }
    if (!button?.matches(".cell")) return;
    const box = document.getElementById(button.getAttribute("popovertarget"));
    button.focus();
    if (!box.matches(":popover-open")) box.showPopover();
    pinned = box;
  };
  addEventListener("hashchange", open);
  open();
}

// Commands are copied by a button; where the browser does not let a page do so, the text is selected.
for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const text = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.firstChild.data = "Copied";
    } catch {
      getSelection().selectAllChildren(text);
      button.firstChild.data = "Selected";
    }
  });
  button.hidden = false;
}

// The long table: sorting by any column, filters.
{
  const table = document.querySelector(".long");
  const form = document.querySelector(".filters");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const order = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

  const key = (row, column) => {
    const cell = row.cells[column];
    if (!("sort" in cell.dataset)) return cell.textContent.trim();
    const value = Number(cell.dataset.sort || NaN);
    return Number.isNaN(value) ? null : value;
  };
  const compare = (a, b) => (typeof a === "number" ? a - b : order.compare(a, b));
  const sort = (column) => {
    const descending = heads[column].getAttribute("aria-sort") === "ascending";
    const keyed = rows.map((row, at) => ({ row, at, key: key(row, column) }));
    keyed.sort((a, b) => {
      if (a.key === null || b.key === null) return (a.key === null) - (b.key === null) || a.at - b.at; // missing ones last
      return (descending ? compare(b.key, a.key) : compare(a.key, b.key)) || a.at - b.at;
    });
    body.append(...keyed.map((entry) => entry.row));
    for (const head of heads) head.removeAttribute("aria-sort");
    heads[column].setAttribute("aria-sort", descending ? "descending" : "ascending");
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(column));
    head.append(button);
  });

  // A number that is typed means a condition's value, never a part of another number; words are looked for in words.
  const keys = [...form.elements].filter((element) => /^c\d+$/.test(element.name));
  const values = (row) => keys.map((element) => row.dataset[element.name].slice(1));
  const said = new Map(
    rows.map((row) => {
      const words = [...row.cells].filter((cell) => !("sort" in cell.dataset) && !cell.classList.contains("seeds"));
      return [row, words.map((cell) => cell.textContent.toLowerCase().replace(/\s+/g, " ")).join(" ")];
    }),
  );
  const has = (row, word) =>
    word !== "" && !Number.isNaN(Number(word))
      ? values(row).some((value) => value !== "" && Number(value) === Number(word))
      : said.get(row).includes(word);
  const filter = () => {
    const words = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const { value: method } = form.elements.method;
    const { value: verdict } = form.elements.verdict;
    let shown = 0;
    for (const row of rows) {
      row.hidden =
        (method !== "" && row.dataset.method !== method) ||
        (verdict !== "" && row.dataset.verdict !== verdict) ||
        keys.some((element) => element.value !== "" && row.dataset[element.name] !== element.value) ||
        !words.every((word) => has(row, word));
      shown += !row.hidden;
    }
    form.elements.shown.value = `${shown} of ${rows.length} cells`;
  };
  for (const kind of ["input", "change"]) form.addEventListener(kind, filter); // some assistive tools send only one
  form.addEventListener("submit", (event) => event.preventDefault());
  form.querySelector("[type=reset]").addEventListener("click", (event) => {
    event.preventDefault();
    form.reset();
    filter();
  });
  form.hidden = false;
  filter();
}
