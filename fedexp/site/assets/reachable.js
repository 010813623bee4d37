// Add what Material lacks for keyboards and screen readers: a name of the search, and a place in the tab order for boxes that scroll.
addEventListener("load", () => {
  document.querySelector('[data-md-component="search"]').setAttribute("aria-label", "Search")
  for (const box of document.querySelectorAll("pre > code, .md-typeset__scrollwrap"))
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0
})
