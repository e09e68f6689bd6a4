// The draws of rectified_flow/randomness.py for one sample: functions of (seed, purpose, number).

const MASK = (1n << 64n) - 1n;
const INITIAL = [
  0x6a09e667f3bcc908n, 0xbb67ae8584caa73bn, 0x3c6ef372fe94f82bn, 0xa54ff53a5f1d36f1n,
  0x510e527fade682d1n, 0x9b05688c2b3e6c1fn, 0x1f83d9abfb41bd6bn, 0x5be0cd19137e2179n,
];
const ORDERS = [
  [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
  [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
  [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
  [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
  [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
  [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
  [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
  [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
  [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
  [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
];
const COLUMNS_THEN_DIAGONALS = [
  [0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15],
  [0, 5, 10, 15], [1, 6, 11, 12], [2, 7, 8, 13], [3, 4, 9, 14],
];
const BLOCK = 128; // bytes
const DIGEST = 8; // bytes

const rotated = (x, by) => (x >> by) | ((x << (64n - by)) & MASK);

/** The first 8 bytes that BLAKE2b with a digest of 8 bytes makes of `text` (RFC 7693), as a little-endian BigInt. */
export function blake2b64(text) {
  const bytes = new TextEncoder().encode(text);
  const blocks = Math.max(1, Math.ceil(bytes.length / BLOCK));
  const padded = new DataView(new ArrayBuffer(blocks * BLOCK));
  bytes.forEach((byte, at) => padded.setUint8(at, byte));
  const state = [...INITIAL];
  state[0] ^= 0x01010000n ^ BigInt(DIGEST);
  for (let block = 0; block < blocks; block++) {
    const words = Array.from({ length: 16 }, (_, i) => padded.getBigUint64(block * BLOCK + 8 * i, true));
    const last = block === blocks - 1;
    compress(state, words, BigInt(last ? bytes.length : (block + 1) * BLOCK), last);
  }
  return state[0];
}

function compress(state, words, counted, last) {
  const v = [...state, ...INITIAL];
  v[12] ^= counted;
  if (last) v[14] ^= MASK;
  for (let round = 0; round < 12; round++) {
    const order = ORDERS[round % 10];
    COLUMNS_THEN_DIAGONALS.forEach(([a, b, c, d], i) => {
      v[a] = (v[a] + v[b] + words[order[2 * i]]) & MASK;
      v[d] = rotated(v[d] ^ v[a], 32n);
      v[c] = (v[c] + v[d]) & MASK;
      v[b] = rotated(v[b] ^ v[c], 24n);
      v[a] = (v[a] + v[b] + words[order[2 * i + 1]]) & MASK;
      v[d] = rotated(v[d] ^ v[a], 16n);
      v[c] = (v[c] + v[d]) & MASK;
      v[b] = rotated(v[b] ^ v[c], 63n);
    });
  }
  for (let i = 0; i < 8; i++) state[i] ^= v[i] ^ v[i + 8];
}

/** Whole numbers of 32 bits from the Mersenne twister (Matsumoto & Nishimura 1998) that torch has on a CPU. */
export class Twister {
  constructor(seed) {
    this.state = new Uint32Array(624);
    this.state[0] = seed;
    for (let i = 1; i < 624; i++) {
      const before = this.state[i - 1];
      this.state[i] = Math.imul(1812433253, before ^ (before >>> 30)) + i;
    }
    this.at = 624;
  }

  next() {
    if (this.at === 624) this.renew();
    let y = this.state[this.at++];
    y ^= y >>> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    return (y ^ (y >>> 18)) >>> 0;
  }

  /** A number in [0, 1), a multiple of 2 ** -24. */
  uniform() {
    return (this.next() & 0xffffff) / 0x1000000;
  }

  renew() {
    const s = this.state;
    for (let i = 0; i < 624; i++) {
      const y = (s[i] & 0x80000000) | (s[(i + 1) % 624] & 0x7fffffff);
      s[i] = s[(i + 397) % 624] ^ (y >>> 1) ^ (y & 1 ? 0x9908b0df : 0);
    }
    this.at = 0;
  }
}

/** The generator of (seed, purpose, number); torch's takes the lower 32 bits of a seed. */
export function generator(seed, purpose, number) {
  const mixed = blake2b64(`(${seed}, '${purpose}', ${number})`) >> 1n;
  return new Twister(Number(mixed & 0xffffffffn));
}

/** `size` standard normal numbers as torch.randn draws them, for 16 or more of them. */
export function normal(source, size) {
  if (size < 16) throw new Error(`${size} normal numbers: torch draws fewer than 16 in another way`);
  const values = new Float32Array(size);
  for (let i = 0; i < size; i++) values[i] = source.uniform();
  for (let i = 0; i + 16 <= size; i += 16) boxMuller(values.subarray(i, i + 16));
  if (size % 16) {
    const last = values.subarray(size - 16);
    for (let i = 0; i < 16; i++) last[i] = source.uniform();
    boxMuller(last);
  }
  return values;
}

function boxMuller(block) {
  for (let i = 0; i < 8; i++) {
    const radius = Math.sqrt(-2 * Math.log(1 - block[i]));
    const angle = 2 * Math.PI * block[i + 8];
    block[i] = radius * Math.cos(angle);
    block[i + 8] = radius * Math.sin(angle);
  }
}

/** The noise that sample.py starts picture `number` of a seed from. */
export const sampleNoise = (seed, number, size) => normal(generator(seed, "sample noise", number), size);

/** The label of the condition `name` that sample.py draws for picture `number` of a seed. */
export const sampleLabel = (seed, name, number, count) => generator(seed, `sample ${name}`, number).next() % count;

/** Spherical interpolation from `a` to `b` (Shoemake 1985), which keeps the length of noise. */
export function slerp(a, b, share) {
  if (share === 0) return a;
  if (share === 1) return b;
  let dot = 0, aa = 0, bb = 0;
  for (let i = 0; i < a.length; i++) {
    dot += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  const angle = Math.acos(Math.min(1, Math.max(-1, dot / Math.sqrt(aa * bb))));
  const sine = Math.sin(angle);
  const [of_a, of_b] = sine < 1e-6 ? [1 - share, share] : [Math.sin((1 - share) * angle) / sine, Math.sin(share * angle) / sine];
  return a.map((value, i) => of_a * value + of_b * b[i]);
}
