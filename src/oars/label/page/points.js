// Draws a million points. By WebGL2 where there is a GPU for it, else pixel by pixel, which is faster than a WebGL2 that
// is only emulated. The points lie in a shuffled order, so that any part of them, from the front, shows the whole map:
// while it moves only as many are drawn as the machine can do.

const DIM = 0.45;
const VERTEX = `#version 300 es
layout(location = 0) in vec2 place;
layout(location = 1) in float kind;
uniform vec2 scale, shift;
uniform float size;
uniform vec3 colours[64];
out vec4 colour;
void main() {
  gl_Position = vec4(place * scale + shift, 0.0, 1.0);
  gl_PointSize = size;
  float guess = step(127.5, kind);
  colour = vec4(colours[int(kind - 128.0 * guess)], mix(1.0, ${DIM}, guess));
}`;
const FRAGMENT = `#version 300 es
precision mediump float;
in vec4 colour;
out vec4 shown;
void main() {
  if (distance(gl_PointCoord, vec2(0.5)) > 0.55) discard;
  shown = vec4(colour.rgb * colour.a, colour.a);
}`;

/** An order in which each front part is spread over all: steps of the golden section, which never fall together. */
function spread(count) {
  let step = Math.max(1, Math.floor(count * 0.6180339887));
  const common = (a, b) => (b ? common(b, a % b) : a);
  while (common(step, count) !== 1) step += 1;
  const order = new Uint32Array(count);
  for (let at = 0, next = 0; at < count; at += 1, next = (next + step) % count) order[at] = next;
  return order;
}

/** Whether WebGL2 is there, and not emulated by the processor. */
function gpu() {
  const gl = document.createElement("canvas").getContext("webgl2");
  const more = gl?.getExtension("WEBGL_debug_renderer_info");
  const name = more ? gl.getParameter(more.UNMASKED_RENDERER_WEBGL) : "";
  gl?.getExtension("WEBGL_lose_context")?.loseContext();
  return Boolean(gl) && !/swiftshader|llvmpipe|softpipe|software|basic render/i.test(name);
}

export class Points {
  constructor(canvas) {
    this.canvas = canvas;
    this.count = 0;
    this.way = gpu() ? new Shader(canvas) : new Plain(canvas);
  }

  /** x and y of each row in turn. */
  place(xy) {
    this.count = xy.length / 2;
    this.order = spread(this.count);
    const shuffled = new Float32Array(xy.length);
    this.order.forEach((row, at) => {
      shuffled[2 * at] = xy[2 * row];
      shuffled[2 * at + 1] = xy[2 * row + 1];
    });
    this.way.place(shuffled);
  }

  /** For each row the number of its class plus one, 0 without one; 128 more when it is a guess. */
  colour(kinds, palette) {
    if (kinds.length !== this.count) return;
    const shuffled = new Uint8Array(this.count);
    this.order.forEach((row, at) => { shuffled[at] = kinds[row]; });
    this.way.colour(shuffled, palette);
  }

  /** Draws this share of the points, and says how many that are. */
  draw({ x, y, zoom }, share = 1) {
    const { width, height } = this.canvas;
    const side = Math.min(width, height) / 2 * zoom;
    const some = Math.min(this.count, Math.max(1, Math.round(this.count * share)));
    const crowd = Math.sqrt(width * height / Math.max(1, this.count)) * Math.sqrt(zoom);
    const size = Math.max(1.5, Math.min(8, crowd * 0.45));
    this.way.draw({ some, across: 2 * side / width, along: 2 * side / height, x, y, size });
    return some;
  }
}

export class Shader {
  constructor(canvas) {
    const gl = canvas.getContext("webgl2", { antialias: false, alpha: false, powerPreference: "high-performance" });
    this.gl = gl;
    const program = gl.createProgram();
    for (const [kind, text] of [[gl.VERTEX_SHADER, VERTEX], [gl.FRAGMENT_SHADER, FRAGMENT]]) {
      const shader = gl.createShader(kind);
      gl.shaderSource(shader, text);
      gl.compileShader(shader);
      gl.attachShader(program, shader);
    }
    gl.linkProgram(program);
    if (!gl.getProgramParameter(program, gl.LINK_STATUS)) throw new Error(gl.getProgramInfoLog(program));
    gl.useProgram(program);
    this.at = Object.fromEntries(["scale", "shift", "size", "colours"].map((name) => [name, gl.getUniformLocation(program, name)]));
    this.places = gl.createBuffer();
    this.kinds = gl.createBuffer();
    gl.enable(gl.BLEND);
    gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
  }

  place(xy) {
    this.fill(this.places, xy, 0, 2, this.gl.FLOAT);
  }

  colour(kinds, palette) {
    this.fill(this.kinds, kinds, 1, 1, this.gl.UNSIGNED_BYTE);
    const colours = new Float32Array(64 * 3);
    palette.slice(0, 64).forEach((parts, at) => parts.forEach((part, channel) => { colours[3 * at + channel] = part / 255; }));
    this.gl.uniform3fv(this.at.colours, colours);
  }

  fill(buffer, data, location, parts, type) {
    const { gl } = this;
    gl.bindBuffer(gl.ARRAY_BUFFER, buffer);
    gl.bufferData(gl.ARRAY_BUFFER, data, gl.STATIC_DRAW);
    gl.enableVertexAttribArray(location);
    gl.vertexAttribPointer(location, parts, type, false, 0, 0);
  }

  draw({ some, across, along, x, y, size }) {
    const { gl } = this;
    gl.viewport(0, 0, gl.drawingBufferWidth, gl.drawingBufferHeight);
    gl.clearColor(0.063, 0.086, 0.11, 1);
    gl.clear(gl.COLOR_BUFFER_BIT);
    gl.uniform2f(this.at.scale, across, along);
    gl.uniform2f(this.at.shift, -x * across, -y * along);
    gl.uniform1f(this.at.size, size);
    gl.drawArrays(gl.POINTS, 0, some);
  }
}

/** Each point is a small square in an image. */
export class Plain {
  constructor(canvas) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d", { alpha: false });
  }

  place(xy) {
    this.xy = xy;
  }

  colour(kinds, palette) {
    const dim = (part) => Math.round(DIM * part + (1 - DIM) * 24);
    const word = ([red, green, blue]) => 0xff000000 | blue << 16 | green << 8 | red;
    this.words = new Uint32Array(256);
    palette.forEach((parts, at) => {
      this.words[at] = word(parts);
      this.words[128 + at] = word(parts.map(dim));
    });
    this.kinds = kinds;
  }

  draw({ some, across, along, x, y, size }) {
    const { width, height } = this.canvas;
    if (this.image?.width !== width || this.image?.height !== height) {
      this.image = new ImageData(width, height);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    const { xy, kinds, words, pixels } = this;
    pixels.fill(0xff1c1610);
    const side = Math.max(1, Math.round(size));
    const [right, left] = [across * width / 2, width / 2 - x * across * width / 2 - side / 2];
    const [up, top] = [-along * height / 2, height / 2 + y * along * height / 2 - side / 2];
    for (let at = 0; at < some; at += 1) {
      const column = (xy[2 * at] * right + left) | 0;
      const line = (xy[2 * at + 1] * up + top) | 0;
      if (column < 0 || line < 0 || column + side > width || line + side > height) continue;
      const word = words[kinds[at]];
      for (let down = 0; down < side; down += 1) {
        const from = (line + down) * width + column;
        for (let over = 0; over < side; over += 1) pixels[from + over] = word;
      }
    }
    this.pen.putImageData(this.image, 0, 0);
  }
}
