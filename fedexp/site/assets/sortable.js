// Sort a table of the class "sortable" by a click on a heading. A cell may have a number for this
// purpose in data-sort. Cells without a number come last.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0]
  const rows = [...body.rows]
  const heads = [...table.tHead.rows[0].cells]
  const order = new Intl.Collator("en", { numeric: true, sensitivity: "base" })
  const key = (row, column) => {
    const cell = row.cells[column]
    if (!("sort" in cell.dataset)) return cell.textContent.trim()
    return cell.dataset.sort === "" ? null : Number(cell.dataset.sort)
  }
  // The difference of two infinite numbers is not a number.
  const compare = (a, b) => (typeof a === "string" ? order.compare(a, b) : a === b ? 0 : a - b)
  heads.forEach((head, column) => {
    const button = document.createElement("button")
    button.type = "button"
    button.append(...head.childNodes)
    button.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending"
      const keyed = rows.map((row, at) => ({ row, at, key: key(row, column) }))
      keyed.sort((a, b) => {
        if (a.key === null || b.key === null) return (a.key === null) - (b.key === null) || a.at - b.at
        return (descending ? compare(b.key, a.key) : compare(a.key, b.key)) || a.at - b.at
      })
      body.append(...keyed.map((entry) => entry.row))
      for (const other of heads) other.removeAttribute("aria-sort")
      head.setAttribute("aria-sort", descending ? "descending" : "ascending")
    })
    head.append(button)
  })
}
