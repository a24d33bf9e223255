"""The dashboards, each in a file named after its uid."""

from grafana.board import Board
from grafana.boards.mps_exporter import BOARD as EXPORTER
from grafana.boards.mps_fleet import BOARD as FLEET
from grafana.boards.mps_gpu import BOARD as GPU
from grafana.boards.mps_host import BOARD as HOST
from grafana.boards.mps_incidents import BOARD as INCIDENTS
from grafana.boards.mps_sharing import BOARD as SHARING
from grafana.boards.mps_user import BOARD as USER
from grafana.boards.mps_v3 import BOARD as V3

BOARDS: tuple[Board, ...] = (FLEET, HOST, SHARING, USER, INCIDENTS, GPU, V3, EXPORTER)
