/* Answers of two policy versions to the same tasks, and versions that were compared apart from the run. */

function drawEvaluations(section, figures) {
  const { before, after, pairs, selection } = figures.answers;
  if (!pairs.length && !figures.comparisons.length) {
    section.hidden = true;
    document.querySelector('nav a[href="#evaluations"]').hidden = true;
    return;
  }
  if (pairs.length) section.append(el("h3", {}, "Answers to held-out tasks"), el("p", {}, selection), answerTable(pairs, before, after));
  for (const one of figures.comparisons) section.append(el("h3", {}, comparedText(one)), answerTable(one.examples, one.before?.version, one.after.version));
}

function answerTable(pairs, before, after) {
  const answer = (name, of) => ({ name, text: true, value: (row) => of(row)?.text ?? "", cell: (row) => answerText(of(row)) });
  const columns = [{ name: "task", text: true, value: (row) => row[1].prompt }];
  if (before != null) columns.push(answer(`version ${before}`, (row) => row[0]));
  columns.push(answer(`version ${after}`, (row) => row[1]));
  if (pairs.some((row) => row[1].greedy)) columns.push(answer(`version ${after}, greedy`, (row) => row[1].greedy));
  return table(pairs, columns);
}

function answerText(answer) {
  return answer ? el("span", {}, el("b", {}, fixed(2)(answer.reward)), " ", visible(answer.text)) : "";
}

/* In words: the environment, what each version earned, and the difference with its interval. */
function comparedText(one) {
  const signed = (value) => (value < 0 ? "" : "+") + fixed(3)(value);
  const earned = (side) => `version ${side.version} ${fixed(3)(side.reward)}`;
  const asked = `${one.environment}, ${whole(one.tasks)} tasks, ${whole(one.answers)} answers each`;
  const given = one.changed.length ? ` (${one.changed.join(", ")})` : "";
  if (!one.before) return `${asked}${given}: ${earned(one.after)}`;
  const [low, high] = one.interval;
  return `${asked}${given}: ${earned(one.before)}, ${earned(one.after)}; difference ${signed(one.difference)} (95 %: ${signed(low)} to ${signed(high)}), ${whole(one.won)} won, ${whole(one.lost)} lost`;
}
