"""Measures training between hosts against DDP written by hand, over links with a rate and a delay.

    python bench/hosts.py                         # all of the table (about two hours, with nothing else running)
    python bench/hosts.py --quick                 # a smoke run: two pairs of the small nets, two hosts, 1 Gb/s
    python bench/hosts.py --only cnn --links 1G --json raw.json

Hosts are network namespaces of this machine, and a link is a program (bench/links.py): so it needs root, /dev/net/tun
and iproute2, and the link's program takes a part of a core. Ours is `oars run --hosts` of bench/train.py, theirs is
bench/train_ddp.py, DDP over Gloo. Both have one thread for each rank, and take turns; a pair of neighbouring runs gives
one ratio. The table shows the median of these with the quarter below and above it.

For the CNN there is also the limit of the link: the time in which a host's share of an allreduce crosses it at the rate
that plain sockets were seen to reach, and the time of a step without any exchange. A step cannot be shorter than the
larger of the two.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from links import HERE, HOSTS, LINKS, Hosts
from table import PLAIN, SIZES, Failed, Report, work

LAYOUTS = {"2 hosts": (1, 1), "4 hosts": (1, 1, 1, 1), "2 hosts, 2 ranks each": (2, 2),
           "hosts with 1 and 2 ranks": (1, 2)}  # ranks on each host
OVER = ("1G", "10G")
# name: network, options of ours. DDP's BatchNorm looks at each rank's rows alone; ours, by default, at the whole batch.
TRAININGS = {"cnn": ("cnn", []), "mlp400": ("mlp400", []), "resnet18": ("resnet18", []),
             "resnet18, local BatchNorm": ("resnet18", ["--local-batchnorm"])}
GOAL, LIMIT = 0.95, 1.15


class Site:
    """Hosts with so many ranks on each, while in this block."""

    def __init__(self, hosts, ranks):
        self.hosts, self.ranks, self._port = hosts, ranks, 29400

    def words(self, net):
        """A training's arguments: a global batch that all ranks can share evenly."""
        count = sum(self.ranks)
        return work(net, batch=-(-SIZES[net][0] // count) * count)

    def ours(self, net, options):
        """A run of `oars run` over these hosts."""
        where = ",".join(f"{name}:{count}" for name, count in zip(self.hosts.names, self.ranks, strict=True))
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "oars", "run", "--quiet", "--name", "it", "--stall", "0", "--hosts", where,
                       *options, str(HERE / "train.py"), *self.words(net)]
            try:
                out = self.hosts.on(self.hosts.names[0], "sh", "-c", f"cd {folder} && exec {' '.join(command)}")
            except SystemExit as error:
                raise Failed(str(error)) from None
            summary = json.loads(Path(folder, "oars-runs/it/summary.json").read_text())
        exchanged = summary["exchange_bytes"] * summary["steps"]
        return {**_result(out), "ahead": summary["ahead_bytes"] / exchanged, "sent": summary["sent_bytes"]}

    def theirs(self, net):
        """The same by DDP, which is started on each host by hand."""
        self._port += 1
        settings = [f"WORLD_SIZE={sum(self.ranks)}", f"MASTER_ADDR={self.hosts.names[0]}", f"MASTER_PORT={self._port}",
                    "GLOO_SOCKET_IFNAME=tap0"]
        return self._everywhere([sys.executable, str(HERE / "train_ddp.py"), *self.words(net)], settings)

    def apart(self, net):
        """As many processes, each with its share of the batch, which exchange nothing."""
        words = self.words(net)
        words[words.index("--batch") + 1] = str(int(words[words.index("--batch") + 1]) // sum(self.ranks))
        return self._everywhere([*PLAIN, *words], [])

    def _everywhere(self, command, settings):
        where = [name for name, count in zip(self.hosts.names, self.ranks, strict=True) for _ in range(count)]
        started = [subprocess.Popen([HOSTS, "on", self.hosts.path, name, "env", *settings, f"RANK={rank}", *command],
                                    env=self.hosts.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                   for rank, name in enumerate(where)]
        try:
            told = [process.communicate(timeout=1200) for process in started]
        finally:
            for process in started:
                process.kill()
        if any(process.returncode for process in started):
            raise Failed(f"{' '.join(command)}\n{''.join(err for _, err in told)[-2000:]}")
        return max((_result(out) for out, _ in told if out.strip()), key=lambda result: result["step"])


def _result(out):
    return json.loads([line for line in out.splitlines() if line.startswith("{")][-1])


def in_turns(sides, repeats):
    """Call the sides in turn, changing who goes first; a list of results for each."""
    results = [[] for _ in sides]
    for i in range(repeats):
        order = range(len(sides)) if i % 2 == 0 else reversed(range(len(sides)))
        for k in order:
            results[k].append(sides[k]())
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def left_early(ours):
    """What share of the gradients left while backward went on."""
    return f"{100 * statistics.median(result['ahead'] for result in ours):.0f} % left early"


def limit_of(site, through, report, name, repeats):
    """The CNN's step against what the link and the cores allow."""
    ours = report.raw[name]["ours"]
    step = statistics.median(result["step"] for result in ours)
    alone = statistics.median(site.apart("cnn")["step"] for _ in range(repeats))
    hosts = len(site.ranks)
    wire = 8 * ours[0]["gradient_bytes"] * 2 * (hosts - 1) / hosts / (1e6 * through)
    ratio = step / max(alone, wire)
    report.missed += ratio > LIMIT
    return (f"{name}: a step takes {1000 * step:.1f} ms; without exchange {1000 * alone:.1f} ms; on the link, at "
            f"{through:.0f} Mb/s, {1000 * wire:.1f} ms; {ratio:.3f} of the larger (goal ≤ {LIMIT}, "
            f"{'missed' if ratio > LIMIT else 'met'})")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two pairs of the small nets, to see that it works")
    parser.add_argument("--only", default="", help="the rows whose names have this in them, as in 'cnn, 2 hosts, 1G'")
    parser.add_argument("--links", choices=LINKS, nargs="+", default=list(OVER))
    parser.add_argument("--repeats", type=int, help="pairs of runs for each figure (default 5; 2 with --quick)")
    parser.add_argument("--json", metavar="FILE", help="keep every single result")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # hosts are taken down
    repeats = args.repeats or (2 if args.quick else 5)
    report, limits, rates = Report(), [], {}
    for link in args.links[:1] if args.quick else args.links:
        for layout, ranks in list(LAYOUTS.items())[: 1 if args.quick else None]:
            trainings = {f"{name}, {layout}, {link}": of for name, of in TRAININGS.items()
                         if args.only in f"{name}, {layout}, {link}" and not (args.quick and name.startswith("resnet"))}
            if not trainings:
                continue
            with Hosts(len(ranks), link) as hosts:
                there_and_back, through = rates[f"{layout}, {link}"] = hosts.measured()
                print(f"{layout}, {link}: {through:.0f} Mb/s and {there_and_back:.2f} ms there and back", flush=True)
                site = Site(hosts, ranks)
                for name, (net, options) in trainings.items():
                    sides = [lambda n=net, o=options, s=site: s.ours(n, o), lambda n=net, s=site: s.theirs(n)]
                    report.pair(name, sides, repeats, GOAL, take=in_turns, note=left_early)
                    if net == "cnn" and link == "1G" and name in report.raw:
                        limits.append(limit_of(site, through, report, name, repeats))
    report.show(repeats)
    print(*limits, sep="\n")
    if args.json:
        Path(args.json).write_text(json.dumps({"links": rates, "repeats": repeats, "runs": report.raw}, indent=1))
    if report.missed:
        print(f"{report.missed} goal{'s' * (report.missed > 1)} missed")


if __name__ == "__main__":
    main()
