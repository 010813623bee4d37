// Add what Material lacks: a name of the search and a place in the tab order for boxes that scroll,
// for keyboards and screen readers, and places for line breaks between the names of a long key.
addEventListener("load", () => {
  document.querySelector('[data-md-component="search"]').setAttribute("aria-label", "Search")
  const between = /(?<=\w[.=/])(?=[a-zA-Z_])/
  for (const box of document.querySelectorAll(".md-typeset :is(:not(pre) > code, h1, h2, h3, h1 > span, h2 > span, h3 > span)"))
    for (const text of [...box.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE)) {
      const parts = text.data.split(between)
      if (parts.length > 1) text.replaceWith(...parts.flatMap((part, at) => at ? [document.createElement("wbr"), part] : [part]))
    }
  for (const box of document.querySelectorAll("pre > code, .md-typeset__scrollwrap, .md-typeset figure"))
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0
})
