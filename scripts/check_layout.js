// Find the faults of the layout of a page. `layout_faults` of check_site.py runs it.
const [mostColumns, smallest, done] = arguments
const faults = new Set()
// Parts of Material that cut long titles on purpose, or that are not shown.
const SKIPPED = ".md-header, .md-search, .md-footer, .md-nav__title, [hidden], script, style, template"

const isShown = (element) => element.checkVisibility({ visibilityProperty: true }) && element.getClientRects().length > 0
const nameOf = (element) => {
  const text = (element.textContent || element.alt || "").trim().replace(/\s+/g, " ")
  return `<${element.localName}> "${text.slice(0, 60)}"`
}
const scrolls = (element) => {
  for (let above = element; above; above = above.parentElement)
    if (/auto|scroll/.test(getComputedStyle(above).overflowX)) return true
  return false
}

// On small windows, the rows of some tables are cards below each other.
const isTable = (table) => [...table.rows].some((row) => getComputedStyle(row).display === "table-row")

// Texts for screen readers only are in a box of one pixel.
const isUnseen = (element) => {
  for (let above = element; above; above = above.parentElement)
    if (above.clientWidth === 1 && above.clientHeight === 1) return true
  return false
}

const elements = [...document.body.querySelectorAll("*")].filter((e) => !e.closest(SKIPPED) && isShown(e))

// Material hides what is beyond the window, so the width of the page is not enough.
const edge = document.documentElement.clientWidth + 1
if (document.documentElement.scrollWidth > innerWidth) faults.add("the page is wider than the window")

// Material's navigation is outside of the window at small widths.
for (const element of elements.filter((e) => !e.closest(".md-sidebar--primary"))) {
  if (isUnseen(element) || element instanceof SVGElement || !element.textContent.trim()) continue
  if (element.getBoundingClientRect().right > edge && !scrolls(element))
    faults.add(`beyond the window: ${nameOf(element)}`)
  const style = getComputedStyle(element)
  if (/hidden|clip/.test(style.overflowX) && element.scrollWidth > element.clientWidth + 1)
    faults.add(`clipped at the side: ${nameOf(element)}`)
  if (/hidden|clip/.test(style.overflowY) && element.scrollHeight > element.clientHeight + 1)
    faults.add(`clipped below: ${nameOf(element)}`)
}

// Hashes may break, since they have no words.
const WORD = /[\p{L}_][\p{L}\p{N}_]{2,39}/gu
const HASH = /^[0-9a-f]{7,}$/
const lines = (range) => {
  const rects = [...range.getClientRects()].filter((rect) => rect.width > 0)
  return rects.some((rect) => rect.top >= rects[0].bottom - 1)
}
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
const range = document.createRange()
for (let node = texts.nextNode(); node; node = texts.nextNode()) {
  const parent = node.parentElement
  if (!node.data.trim() || parent.closest(SKIPPED) || parent.closest("svg") || !isShown(parent)) continue
  range.selectNodeContents(node)
  if (!lines(range)) continue
  for (const word of node.data.matchAll(WORD)) {
    range.setStart(node, word.index)
    range.setEnd(node, word.index + word[0].length)
    if (!HASH.test(word[0]) && lines(range)) faults.add(`broken name: ${word[0]}`)
  }
}

for (const table of document.querySelectorAll("table")) {
  const columns = Math.max(0, ...[...table.rows].map((row) => row.cells.length))
  if (columns > mostColumns && isShown(table) && isTable(table) && !scrolls(table))
    faults.add(`a table of ${columns} columns does not scroll: ${nameOf(table)}`)
}

for (const box of [".md-tabs__list", ".md-nav--primary > .md-nav__list"]) {
  const targets = [...document.querySelectorAll(`${box} a[href]`)]
    .filter((link) => !link.closest(".md-nav--secondary"))
    .map((link) => link.href.split("#")[0])
  for (const target of targets.filter((one, at) => targets.indexOf(one) !== at))
    faults.add(`twice in the navigation: ${target.split("/").slice(-3).join("/")}`)
}

for (const list of document.querySelectorAll(".md-nav--primary .md-nav__list")) {
  const titles = [...list.querySelectorAll(":scope > .md-nav__item > .md-nav__link, :scope > .md-nav__item > .md-nav__container > .md-nav__link")]
    .filter((link) => link.href && !link.closest(".md-nav--secondary"))
    .map((link) => link.textContent.trim())
  for (const title of titles.filter((one, at) => titles.indexOf(one) !== at))
    faults.add(`two pages in the navigation have one title: ${title}`)
}

const drawings = [...document.querySelectorAll("img, svg[data-font]")].filter((e) => !e.closest(SKIPPED) && isShown(e))
// An image that is loaded late has no width yet.
for (const drawing of drawings) drawing.loading = "eager"
Promise.all(drawings.map((drawing) => drawing.decode?.().catch(() => 0))).then(() => {
  for (const drawing of smallest > 0 ? drawings : []) {
    const { font, width } = drawing.dataset
    const what = drawing.getAttribute("src")?.slice(-60) ?? drawing.getAttribute("aria-label")?.slice(0, 60)
    if (font === undefined || width === undefined) {
      faults.add(`a drawing has no data-font and data-width: ${what}`)
      continue
    }
    const height = (font * drawing.getBoundingClientRect().width) / width
    if (font > 0 && height < smallest) faults.add(`labels of ${height.toFixed(1)} pixels: ${what}`)
  }
  done([...faults])
})
