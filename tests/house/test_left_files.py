"""Files of a killed launcher do not stay: what MPICH's leaves in /tmp goes once none runs."""

from __future__ import annotations

import os
import time

import psutil

from tests.helpers.jobs import remove_left_by_hydra


class Proxy:
    """A process of MPICH's launcher on this host."""

    def __init__(self, status):
        self.info = {"name": "hydra_pmi_proxy", "status": status}


def left_in(folder):
    file = folder / "hydra_hwloc_xmlfile_0h9P0T"
    file.write_text("<topology/>")
    os.utime(file, (time.time() - 5,) * 2)
    (folder / "hydra_of_others").write_text("")
    return file


def test_files_that_no_launcher_uses_are_removed(tmp_path, monkeypatch):
    ended = [Proxy(psutil.STATUS_ZOMBIE)]  # which nobody has waited for yet
    monkeypatch.setattr(psutil, "process_iter", lambda _names: ended)
    file = left_in(tmp_path)
    remove_left_by_hydra(tmp_path)
    assert not file.exists()
    assert (tmp_path / "hydra_of_others").exists()


def test_files_stay_while_a_launcher_may_use_them(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "process_iter", lambda _names: [Proxy(psutil.STATUS_SLEEPING)])
    file = left_in(tmp_path)
    remove_left_by_hydra(tmp_path)
    assert file.exists()


def test_a_file_that_is_made_meanwhile_stays(tmp_path, monkeypatch):
    file = left_in(tmp_path)

    def none_yet(_names):
        os.utime(file, (time.time() + 5,) * 2)
        return []

    monkeypatch.setattr(psutil, "process_iter", none_yet)
    remove_left_by_hydra(tmp_path)
    assert file.exists()
