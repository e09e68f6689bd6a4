"""Tests of the example on random fields: their law, and the comparison of samples with the law."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chi2, norm

from compare_spectrum import CompareFlags, compare
from make_fields import MakeFlags, make
from random_fields import Law, draw_field
from rectified_flow.cli.settings import parse
from rectified_flow.errors import UsageError
from rectified_flow.measurements.scores import wave_numbers

COUNT, LAW = 400, Law(16)


def make_fields(folder: Path, words: str = "") -> Path:
    make(parse(MakeFlags, "", f"--output_dir {folder} --num_fields {COUNT} --side 16 {words}".split()))
    return folder


def read(folder: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.stack([np.load(path) for path in sorted(folder.iterdir())])


def compared(folder: Path, samples: str = "fields") -> None:
    words = f"--samples {folder / samples} --law {folder / 'law.json'} --output {folder / 'spectrum.png'}"
    compare(parse(CompareFlags, "", words.split()))


def test_the_fields_have_their_law(tmp_path: Path) -> None:
    """Over the law, the power of the modes of a ring has a chi-square distribution, with a degree for each mode."""
    fields = read(make_fields(tmp_path / "fields"))
    assert fields.shape == (COUNT, 2, 16, 16)
    assert fields.dtype == np.float32
    means, deviations = np.array(LAW.means)[:, None, None], np.array(LAW.deviations)[:, None, None]
    numbers = wave_numbers(16, 16).numpy()
    shape = (numbers**2 + LAW.cutoff**2) ** (-LAW.slope / 2)
    powers = np.abs(np.fft.fft2((fields - means) / deviations)) ** 2 / 256 / (shape / shape.mean())
    for channel in range(2):
        for shell in range(12):  # 0 has the means of the fields, and 11 the corners
            ring = np.floor(numbers + 0.5) == shell
            assert 5e-4 < chi2.cdf(powers[:, channel, ring].sum(), COUNT * ring.sum()) < 1 - 5e-4


def test_the_channels_have_their_correlation(tmp_path: Path) -> None:
    """The Fisher transformation of the coefficient of white noise is normal, with the variance 1 / (n - 3)."""
    fields = read(make_fields(tmp_path / "fields"))
    modes = np.fft.fft2(fields)[:, :, 1:8, 1:].reshape(COUNT, 2, 7 * 15)  # half of the modes, which are independent
    white = modes / np.sqrt(LAW.power().numpy()[1:8, 1:].flatten())
    one, two = np.concatenate((white.real, white.imag)).swapaxes(0, 1).reshape(2, -1)
    error = np.arctanh(np.corrcoef(one, two)[0, 1]) - np.arctanh(LAW.correlation)
    assert abs(error) * (len(one) - 3) ** 0.5 < norm.ppf(1 - 5e-4)


def test_a_field_is_a_function_of_seed_and_number(tmp_path: Path) -> None:
    first, again = read(make_fields(tmp_path / "one")), read(make_fields(tmp_path / "two"))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first[7], draw_field(LAW, 0, 7))
    other = read(make_fields(tmp_path / "three", "--seed 1"))
    assert all(len(np.unique(values)) == 2 * COUNT for values in np.concatenate((first, other))[:, :, 3, 3].T)


def test_the_folder_has_fields_alone(tmp_path: Path) -> None:
    folder = make_fields(tmp_path / "fields")
    assert [path.name for path in sorted(folder.iterdir())] == [f"{number:06}.npy" for number in range(COUNT)]
    assert json.loads((tmp_path / "law.json").read_text())["side"] == 16
    with pytest.raises(UsageError, match=r"--output_dir .*fields is not empty: delete it, or choose another folder"):
        make_fields(folder)


def test_the_comparison_finds_a_wrong_channel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in make_fields(tmp_path / "fields").iterdir():
        np.save(path, np.load(path) * np.array([1, -2], np.float32)[:, None, None])
    compared(tmp_path)
    written = capsys.readouterr().out
    assert (tmp_path / "spectrum.png").read_bytes().startswith(b"\x89PNG")
    (one, two, correlation), (_, new, _) = re.findall(r": .* (.*)% and (.*)%, correlation (.*)$", written, re.M)
    assert float(new) < 9
    assert float(one) < 9
    assert 270 < float(two) < 340, "the power is 4 times the law"
    assert float(correlation) == pytest.approx(-0.6, abs=0.03)


def test_unusable_samples_are_named(tmp_path: Path) -> None:
    make_fields(tmp_path / "fields")
    with pytest.raises(UsageError, match=r"--samples .*none has no \.npy files"):
        compared(tmp_path, "none")
    (tmp_path / "fields/law.json").write_text(json.dumps({"side": 8}))
    with pytest.raises(UsageError, match=r"0\.npy has the shape \(2, 16, 16\), not that of the law: remove it"):
        compare(parse(CompareFlags, "", f"--samples {tmp_path}/fields --law {tmp_path}/fields/law.json".split()))
    (tmp_path / "fields/000007.npy").write_bytes((tmp_path / "fields/000008.npy").read_bytes()[:300])
    with pytest.raises(UsageError, match=r"fields/000007\.npy cannot be read \(.*\): remove it"):
        compared(tmp_path)
    (tmp_path / "fields/grid-2.png").touch()
    with pytest.raises(UsageError, match=r"fields has the samples of several calls \(grid-2\.png\): pass those of one"):
        compared(tmp_path)
