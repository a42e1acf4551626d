// Walk through sampled tokens with the arrow keys, or point at one; what it is appears below the trajectory.
// Without script, each token's numbers are in its tooltip.
document.querySelectorAll(".tokens").forEach((box) => {
  const readout = box.parentElement.querySelector(".readout");
  const tokens = Array.from(box.querySelectorAll(".t"));
  let current = -1;
  const show = (index) => {
    if (tokens[current]) tokens[current].classList.remove("current");
    current = Math.max(0, Math.min(tokens.length - 1, index));
    const token = tokens[current];
    if (!token) return;
    token.classList.add("current");
    readout.textContent = "Token " + (current + 1) + " of " + tokens.length + ": " + token.title;
    return token;
  };
  readout.textContent = tokens.length + " sampled tokens. Point at one, or press an arrow key here.";
  box.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!move) return;
    event.preventDefault();
    const token = show(current + move);
    if (token) token.scrollIntoView({ block: "nearest" });
  });
  box.addEventListener("mouseover", (event) => {
    const index = tokens.indexOf(event.target.closest(".t"));
    if (index >= 0) show(index);
  });
});
