"""A two-hop all-reduce in SimGrid, another simulator: run by the Python that has Debian's python3-simgrid.

    /usr/bin/python3 tests/simulator/simgrid_two_hop.py WORKERS SIZE_BYTES BYTES_PER_S LATENCY_S CHUNK_BYTES WINDOW

As many reducers as workers. Every worker pushes its shard's chunks to each reducer, at most WINDOW of them without the
total back. Prints the seconds.
"""

import sys

from simgrid import Actor, Comm, Engine, Host, LinkInRoute, NetZone, Semaphore

HEADER_BYTES = 40


def main(
    worker_count: int, size_bytes: int, bytes_per_s: float, latency_s: float, chunk_bytes: int, window: int
) -> None:
    # Flows share links fairly, and only by their bytes.
    options = ["root.thres:error", "network/model:CM02", "network/crosstraffic:0", "network/TCP-gamma:0"]
    engine = Engine(["two_hop", f"--log={options[0]}", *(f"--cfg={option}" for option in options[1:])])
    zone = NetZone.create_star_zone("zone")

    def add_host(name: str) -> Host:
        host = zone.create_host(name, 1e9)
        link = zone.create_split_duplex_link(f"link of {name}", bytes_per_s)
        link.set_latency(latency_s / 2)
        link.seal()
        host.seal()
        zone.add_route(host.netpoint, None, None, None, [LinkInRoute(link, LinkInRoute.UP)], True)
        return host

    workers = [add_host(f"worker {number}") for number in range(worker_count)]
    reducers = [add_host(f"reducer {number}") for number in range(worker_count)]
    zone.seal()

    shard_bytes = size_bytes // worker_count
    whole, rest = divmod(shard_bytes, chunk_bytes)
    chunks = [chunk_bytes] * whole + ([rest] if rest else [])
    arrived = {reducer: [0] * len(chunks) for reducer in range(worker_count)}
    pairs = [(worker, reducer) for worker in range(worker_count) for reducer in range(worker_count)]
    room = {pair: Semaphore(window) for pair in pairs}
    complete = {pair: Semaphore(0) for pair in pairs}

    def push(worker: int, reducer: int) -> None:
        for number, count in enumerate(chunks):
            room[worker, reducer].acquire()
            Comm.sendto(workers[worker], reducers[reducer], count + HEADER_BYTES)
            arrived[reducer][number] += 1
            if arrived[reducer][number] == worker_count:
                for other in range(worker_count):
                    complete[other, reducer].release()

    def give_back(worker: int, reducer: int) -> None:
        for count in chunks:
            complete[worker, reducer].acquire()
            Comm.sendto(reducers[reducer], workers[worker], count + HEADER_BYTES)
            room[worker, reducer].release()

    for worker, reducer in pairs:
        Actor.create(f"push {worker} {reducer}", workers[worker], push, worker, reducer)
        Actor.create(f"give back {reducer} {worker}", reducers[reducer], give_back, worker, reducer)
    engine.run()
    print(Engine.clock)


if __name__ == "__main__":
    count, size, rate, latency, chunk, window_chunks = sys.argv[1:]
    main(int(count), int(size), float(rate), float(latency), int(chunk), int(window_chunks))
