/* The sessions a page holds: their list, and their tokens out of compressed blocks (blocks.py writes them). */

const GIVEN = 0, CARRIED = 1, TRAINED = 2;

class Sessions {
  constructor({ columns, block, num_all }, { ids, bytes }) {
    this.numAll = num_all;
    this.list = block.map((number, i) => ({ block: number, ...Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[i]])) }));
    this.bytes = new Map(ids.map((id, i) => [id, Uint8Array.from(bytes[i], (c) => c.charCodeAt(0))]));
    this.newest = { number: -1, opened: null };
  }

  /* The branches of a session by id, with all tokens, those of the parent too. */
  async open(facts) {
    // one block is kept: neighbours in the list often lie in the same
    if (this.newest.number !== facts.block) this.newest = { number: facts.block, opened: readBlock(facts.block) };
    const { sessions, arrays } = await this.newest.opened;
    const session = sessions.find((one) => one.id === facts.session_id);
    const branches = new Map();
    const whole = (described) => {
      if (branches.has(described.id)) return branches.get(described.id);
      const parent = described.parent == null ? null : whole(session.branches.find((b) => b.id === described.parent));
      const branch = { ...described };
      for (const [name, array] of Object.entries(arrays)) {
        const own = array.subarray(described.begin, described.begin + described.length);
        branch[name] = parent ? joined(parent[name].subarray(0, described.shared), own) : own;
      }
      // what is trained in the parent is not trained here again
      for (let i = 0; i < branch.shared; i++) branch.states[i] = Math.min(branch.states[i], CARRIED);
      branch.texts = this.texts(branch.ids);
      branches.set(branch.id, branch);
      return branch;
    };
    session.branches.forEach(whole);
    return { ...session, branches };
  }

  /* The text of every token. A character of several tokens belongs to the one that completes it; the others are null. */
  texts(ids) {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    return Array.from(ids, (id, i) => decoder.decode(this.bytes.get(id), { stream: i < ids.length - 1 }) || (this.bytes.get(id).length ? null : ""));
  }

  hex(id) {
    return Array.from(this.bytes.get(id), (byte) => byte.toString(16).padStart(2, "0")).join(" ");
  }
}

function joined(first, second) {
  const array = new first.constructor(first.length + second.length);
  array.set(first);
  array.set(second, first.length);
  return array;
}

async function readBlock(number) {
  const { buffer } = await decodeBlock(`block-${number}`);
  const length = new DataView(buffer).getUint32(0, true);
  const sessions = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const begin = 4 + length, count = (buffer.byteLength - begin) / 11;
  return {
    sessions,
    arrays: {
      ids: new Int32Array(buffer, begin, count),
      versions: new Int32Array(buffer, begin + 4 * count, count),
      logprobs: new Int16Array(buffer, begin + 8 * count, count),
      states: new Uint8Array(buffer, begin + 10 * count, count),
    },
  };
}
