// Add what Material lacks: a name of the search and a place in the tab order for boxes that scroll,
// for keyboards and screen readers, and places for line breaks between the names of a long key.
addEventListener("load", () => {
  document.querySelector('[data-md-component="search"]').setAttribute("aria-label", "Search")
  for (const code of document.querySelectorAll(".md-typeset :not(pre) > code"))
    if (!code.children.length) code.innerHTML = code.innerHTML.replace(/(?<=\w)([.=/])(?=[a-zA-Z_])/g, "$1<wbr>")
  for (const box of document.querySelectorAll("pre > code, .md-typeset__scrollwrap, .md-typeset figure"))
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0
})
