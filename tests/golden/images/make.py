"""Writes small images of many kinds and their pixels by Pillow: decoded.npz and webp.npz (RGB, the bits of each file), scaled.npz (crops and sizes).

torchvision's ImageFolder, Resize, CenterCrop and RandomResizedCrop use Pillow by default. Needs Pillow (13.0.0 wrote these) and NumPy;
the files are committed. The images are smooth waves, because decoders would differ in the JPEG artefacts of noise.
"""

import io
import pathlib

import numpy as np
from PIL import Image

HERE = pathlib.Path(__file__).parent
FOLDER = HERE / "folder"


def picture(width, height, phase):
    y, x = np.mgrid[0:height, 0:width] / 40.0
    waves = [np.sin(3 * x + phase) + np.cos(2 * y), np.sin(2 * y - phase) + np.cos(x + y), np.cos(4 * x * y + phase) + np.sin(x)]
    return np.clip(127.5 + 63 * np.stack(waves, -1), 0, 255).astype("u1")


def save(path, image, **options):
    path = FOLDER / path
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = options.pop("kind", None)
    image.save(path, kind, **options)


def files():
    rgb = [Image.fromarray(picture(*size, k)) for k, size in enumerate([(52, 40), (37, 61), (64, 48), (9, 40), (33, 17), (100, 30)])]
    save("boat/plain.jpg", rgb[0], quality=90)                                       # 4:2:0
    save("boat/full.JPG", rgb[1], quality=95, subsampling=0)
    save("boat/half.jpeg", rgb[2], quality=90, subsampling=1)                        # 4:2:2
    save("boat/near/narrow.jpg", rgb[3], quality=90)
    save("boat/near/progressive.jpg", rgb[4], quality=90, progressive=True)
    exif = Image.Exif()
    exif[0x112] = 6                                                                  # rotated by EXIF, which torchvision ignores
    save("car/turned.jpg", rgb[5], quality=90, exif=exif)
    save("car/grey.jpg", rgb[2].convert("L"), quality=90)
    save("car/cmyk.jpg", rgb[0].convert("CMYK"), quality=95)
    save("car/rgb.jpg", rgb[0], quality=95, keep_rgb=True)
    save("car/restarts.jpg", rgb[5], quality=90, restart_marker_blocks=2)
    save("car/png.jpeg", rgb[4], kind="PNG")
    save("dog/noise.png", Image.fromarray(np.random.default_rng(1).integers(0, 256, (41, 53, 3), "u1")))
    alpha = Image.fromarray(picture(20, 10, 5)[..., 0])
    four = rgb[4].resize((20, 10))
    four.putalpha(alpha)
    save("dog/rgba.png", four)
    save("dog/grey_alpha.png", four.convert("LA"))
    save("dog/palette.png", rgb[4].quantize(16))
    save("dog/palette_clear.png", rgb[4].quantize(16), transparency=3)
    save("dog/grey.png", rgb[4].convert("L"))
    save("dog/black_white.png", rgb[4].convert("1"))
    save("dog/grey16.png", Image.fromarray(np.arange(0, 65536, 257 * 5, dtype="u2").reshape(4, 13)))


def decoded():
    out = {}
    for path in sorted(FOLDER.rglob("*.*")):
        image = Image.open(path)
        # Pillow clamps 16-bit grey at 255; the high byte has the visible image.
        pixels = np.repeat((np.array(image) >> 8).astype("u1")[..., None], 3, -1) if image.mode == "I;16" else np.array(image.convert("RGB"))
        out[str(path.relative_to(FOLDER))] = pixels
    np.savez_compressed(HERE / "decoded.npz", **out)


def center(image, resize, pixels):
    """torchvision.transforms.Resize(resize) and CenterCrop(pixels)."""
    w, h = image.size
    short, long = min(w, h), max(w, h)
    new = int(resize * long / short)
    image = image.resize((resize, new) if w <= h else (new, resize), Image.Resampling.BILINEAR)
    w, h = image.size
    top, left = int(round((h - pixels) / 2.0)), int(round((w - pixels) / 2.0))
    return image.crop((left, top, left + pixels, top + pixels))


def scaled():
    noise = Image.open(FOLDER / "dog/noise.png")
    out = {}
    for x, y, w, h in [(0, 0, 53, 41), (5, 7, 30, 20), (52, 0, 1, 41), (11, 40, 42, 1), (3, 2, 16, 16)]:
        for pixels in (1, 7, 16, 30, 64):
            crop = noise.crop((x, y, x + w, y + h))
            out[f"crop-{x}-{y}-{w}-{h}-{pixels}"] = np.array(crop.resize((pixels, pixels), Image.Resampling.BILINEAR))
    for resize, pixels in [(16, 16), (18, 16), (37, 32), (41, 24), (64, 5), (60, 59)]:
        out[f"center-wide-{resize}-{pixels}"] = np.array(center(noise, resize, pixels))
        out[f"center-tall-{resize}-{pixels}"] = np.array(center(noise.transpose(Image.Transpose.TRANSPOSE), resize, pixels))
    np.savez_compressed(HERE / "scaled.npz", **out)


def webp():
    """WebP files of each kind, and their pixels: webp.npz."""
    place = HERE / "webp"
    place.mkdir(exist_ok=True)
    wave, tall = Image.fromarray(picture(52, 40, 0)), Image.fromarray(picture(37, 61, 1))
    clear = tall.copy()
    clear.putalpha(Image.fromarray(picture(37, 61, 5)[..., 0]))
    exif = Image.Exif()
    exif[0x112] = 6
    noise = Image.fromarray(np.random.default_rng(2).integers(0, 256, (23, 31, 3), "u1"))
    wave.save(place / "lossy.webp", quality=80)
    tall.save(place / "odd.webp", quality=40)
    noise.save(place / "rough.webp", quality=95)
    Image.fromarray(picture(90, 70, 3)).save(place / "segments.webp", quality=30, method=6)
    clear.save(place / "lossy_alpha.webp", quality=80, alpha_quality=50)
    wave.save(place / "lossless.webp", lossless=True)
    noise.save(place / "lossless_rough.webp", lossless=True)
    clear.save(place / "lossless_alpha.webp", lossless=True, exact=True)
    wave.quantize(12).convert("RGB").save(place / "colours.webp", lossless=True)
    wave.save(place / "exif.webp", quality=80, exif=exif)                            # an extended file, not rotated
    np.savez_compressed(HERE / "webp.npz", **{path.name: np.array(Image.open(path).convert("RGB")) for path in sorted(place.glob("*.webp"))})
    wave.save(place / "animated.webp", save_all=True, append_images=[noise.resize(wave.size)])


if __name__ == "__main__":
    files()
    decoded()
    scaled()
    webp()
