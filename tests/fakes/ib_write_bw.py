"""An `ib_write_bw` without hardware: both sides meet over TCP, and FAULTS says what each port reaches.

FAULTS is a folder: `<node>-<hca>` holds the Gb/s of a port, 0 for one that does not open, and `hang-<node>-<hca>` makes
it hang. NODE names the node.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from pathlib import Path

HEALTHY = 391.12
TABLE = """\
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF\t\tDevice         : {hca}
 Number of qps   : 1\t\tTransport type : IB
 local address: LID 0000 QPN 0x0126 PSN 0x8ee7c RKey 0x1fff00 VAddr 0x007f0000000000
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 8388608    29129            0.00               {gbps:.2f}              0.005828
---------------------------------------------------------------------------------------
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    for flag in ("-d", "-i", "-p", "-s", "-D", "-x"):
        parser.add_argument(flag)
    parser.add_argument("-F", action="store_true")
    parser.add_argument("--report_gbits", action="store_true")
    parser.add_argument("server", nargs="?")
    options = parser.parse_args()
    node, faults = os.environ["NODE"], Path(os.environ["FAULTS"])
    if (faults / f"hang-{node}-{options.d}").exists():
        time.sleep(600)
    own = _gbps(faults / f"{node}-{options.d}", HEALTHY)
    if own == 0.0:
        print(f" IB device {options.d} not found", file=sys.stderr)
        return 1
    connection = _connected(options.server, int(options.p))
    with connection:
        connection.sendall(f"{own}\n".encode())
        other = float(connection.makefile().readline())
    if options.server:
        print(TABLE.format(hca=options.d, gbps=min(own, other)))
    return 0


def _gbps(file: Path, otherwise: float) -> float:
    return float(file.read_text()) if file.exists() else otherwise


def _connected(server: str | None, port: int) -> socket.socket:
    if server:
        return socket.create_connection((server, port), timeout=20)
    with socket.create_server(("", port)) as listener:
        listener.settimeout(60)
        return listener.accept()[0]


if __name__ == "__main__":
    sys.exit(main())
