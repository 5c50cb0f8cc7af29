"use strict";
// Names and roles of dash's controls for keyboards and screen readers: tabs are tabs, choices are groups of choices.

(function () {
  function set(element, name, value) {
    if (element.getAttribute(name) !== value) { element.setAttribute(name, value); }
  }

  function mendTabs() {
    const list = document.querySelector(".tabs");
    if (!list) { return; }
    set(list, "role", "tablist");
    set(list, "aria-label", "pages");
    list.querySelectorAll(".tab").forEach(function (tab) {
      const isChosen = tab.classList.contains("tab--selected");
      set(tab, "role", "tab");
      set(tab, "aria-selected", String(isChosen));
      set(tab, "tabindex", isChosen ? "0" : "-1");
      set(tab, "aria-controls", "panel");
    });
  }

  function mendChoices() {
    // Their options are labels of real inputs: a list box would hide them. Those of a dropdown are a list box.
    document.querySelectorAll(".dash-radioitems, .dash-checklist").forEach(function (list) {
      const legend = list.closest("fieldset")?.querySelector("legend");
      set(list, "role", list.classList.contains("dash-radioitems") ? "radiogroup" : "group");
      set(list, "aria-label", legend?.textContent || "choices");
      list.querySelectorAll("label[role], label[aria-selected]").forEach(function (label) {
        label.removeAttribute("role");
        label.removeAttribute("aria-selected");
      });
    });
    document.querySelectorAll(".dash-dropdown-focus-target").forEach((input) => set(input, "tabindex", "-1"));
  }

  let isPlanned = false;
  new MutationObserver(function () {
    if (isPlanned) { return; }
    isPlanned = true;
    requestAnimationFrame(function () {
      isPlanned = false;
      mendTabs();
      mendChoices();
    });
  }).observe(document.documentElement, { childList: true, subtree: true, attributeFilter: ["class", "aria-selected"] });

  document.addEventListener("keydown", function (event) {
    const tab = event.target.closest?.("[role=tab]");
    if (!tab) { return; }
    const tabs = Array.from(tab.parentElement.querySelectorAll("[role=tab]"));
    const place = tabs.indexOf(tab);
    const next = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (event.key === "Enter" || event.key === " ") { tab.click(); event.preventDefault(); return; }
    if (next === undefined) { return; }
    const wanted = tabs[(next + tabs.length) % tabs.length];
    event.preventDefault();
    wanted.focus();
    wanted.click();
  });
})();
