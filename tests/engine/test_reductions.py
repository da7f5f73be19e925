# SPDX-License-Identifier: Apache-2.0
"""Losses, penalties and views of sharded parameters are one process's, or refused by name.

Ranks as threads refuse what DTensor's own dispatch does, so these run on Gloo.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from support.beside import shard, whole
from support.sampling import survey
from support.world import on_processes
from torch import nn

from fullshard.core.errors import FullshardError

# Of two parameters of one shape: values and gradients are those of one process, or refused.
LOSSES = {
    f"{name} {reduction}": lambda p, q, loss=loss, reduction=reduction: loss(
        p, q, reduction=reduction
    )
    for name, loss in {
        "mse_loss": F.mse_loss,
        "l1_loss": F.l1_loss,
        "smooth_l1_loss": F.smooth_l1_loss,
        "huber_loss": F.huber_loss,
        "soft_margin_loss": F.soft_margin_loss,
        "kl_div": F.kl_div,
        "poisson_nll_loss": F.poisson_nll_loss,
        "hinge_embedding_loss": F.hinge_embedding_loss,
        "multilabel_soft_margin_loss": F.multilabel_soft_margin_loss,
        "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
        "binary_cross_entropy": lambda p, q, **how: F.binary_cross_entropy(
            p.sigmoid(), q.sigmoid(), **how
        ),
        "cross_entropy": F.cross_entropy,
        "gaussian_nll_loss": lambda p, q, **how: F.gaussian_nll_loss(
            p, q, torch.ones_like(p), **how
        ),
        "cosine_embedding": lambda p, q, **how: F.cosine_embedding_loss(
            p, q, torch.ones(len(p)), **how
        ),
        "triplet": lambda p, q, **how: F.triplet_margin_loss(p, q, p + q, **how),
    }.items()
    for reduction in ("none", "sum", "mean")
}
PENALTIES = {
    "sum": lambda p, q: p.square().sum(),
    "mean": lambda p, q: (p * q).mean(),
    "sum of rows": lambda p, q: p.square().sum(0).max(),
    "sum in rows": lambda p, q: p.square().sum(1).prod(),
    "mean of rows": lambda p, q: p.mean(0).square().sum(),
    "mean in rows": lambda p, q: p.mean(1).square().sum(),
    "mean of dims": lambda p, q: p.mean((0, 1)) * 2,
    "max": lambda p, q: p.max(),
    "min": lambda p, q: p.min(),
    "amax": lambda p, q: p.amax(),
    "amin": lambda p, q: p.amin(),
    # By hidden sums over no dims, which count how many elements are the extreme.
    "amax at the end": lambda p, q: (p + torch.arange(p.numel()).view(p.shape)).amax(),
    "amin at the end": lambda p, q: (p - torch.arange(p.numel()).view(p.shape)).amin(),
    **{
        f"{name} over no dims": lambda p, q, name=name: getattr(torch, name)(
            p * torch.arange(p.numel()).view(p.shape), [], keepdim=True
        ).sum()
        for name in ("sum", "mean", "amax", "amin", "std", "logsumexp")
    },
    "amax of rows": lambda p, q: p.amax(0).sum(),
    "amax in rows": lambda p, q: p.amax(1).sum(),
    "amax kept": lambda p, q: p.amax((0, 1), keepdim=True).sum(),
    "aminmax": lambda p, q: sum(torch.aminmax(p)),
    "max of rows": lambda p, q: p.max(0).values.sum(),
    "max in rows": lambda p, q: p.max(1).values.sum(),
    "median": lambda p, q: p.median(),
    "prod": lambda p, q: p.prod(),
    "prod of rows": lambda p, q: p.prod(0).sum(),
    "norm": lambda p, q: p.norm(),
    "norm 1": lambda p, q: p.norm(1),
    "norm 3": lambda p, q: p.norm(3),
    "norm inf": lambda p, q: torch.linalg.vector_norm(p, float("inf")),
    "norm -inf": lambda p, q: torch.linalg.vector_norm(p, -float("inf")),
    "norm of rows": lambda p, q: p.norm(dim=0).sum(),
    "norm in rows": lambda p, q: p.norm(dim=1).sum(),
    "norm inf of rows": lambda p, q: torch.linalg.vector_norm(p, float("inf"), dim=0).sum(),
    "norm kept": lambda p, q: (p / p.norm(dim=0, keepdim=True)).square().mean(),
    "weight norm": lambda p, q: (p / p.norm(dim=1, keepdim=True) * q).sum(),
    "std": lambda p, q: p.std(),
    "var": lambda p, q: p.var(),
    "var of rows": lambda p, q: p.var(0).sum(),
    "var in rows": lambda p, q: p.var(1).sum(),
    "std in rows": lambda p, q: p.std(1).sum(),
    "logsumexp": lambda p, q: p.logsumexp((0, 1)),
    "logsumexp of rows": lambda p, q: p.logsumexp(0).sum(),
    "logsumexp in rows": lambda p, q: p.logsumexp(1).sum(),
    "softmax of rows": lambda p, q: (p.softmax(0) * q).sum(),
    "softmax in rows": lambda p, q: (p.softmax(1) * q).sum(),
    "log_softmax of rows": lambda p, q: (p.log_softmax(0) * q).mean(),
    "cumsum of rows": lambda p, q: (p.cumsum(0) * q).sum(),
    "cumsum in rows": lambda p, q: (p.cumsum(1) * q).sum(),
    "cosine_similarity": lambda p, q: F.cosine_similarity(p, q, dim=1).sum(),
    "cosine_similarity of rows": lambda p, q: F.cosine_similarity(p, q, dim=0).sum(),
    "pairwise": lambda p, q: F.pairwise_distance(p, q).sum(),
    "cdist": lambda p, q: torch.cdist(p, q).sum(),
    "gram": lambda p, q: (p @ p.T - torch.eye(len(p))).square().sum(),
    "gram of columns": lambda p, q: (p.T @ q).square().mean(),
    "gram of columns, identity": lambda p, q: (p.T @ p - torch.eye(3)).norm(),
    "dot": lambda p, q: torch.dot(p.flatten(), q.flatten()),
    "vdot": lambda p, q: torch.vdot(p.reshape(-1), q.reshape(-1)),
    "einsum": lambda p, q: torch.einsum("ij,ij->", p, q),
    "einsum of rows": lambda p, q: torch.einsum("ij,kj->ik", p, q).square().sum(),
    "trace": lambda p, q: (p @ q.T).trace(),
    "nuclear": lambda p, q: torch.linalg.matrix_norm(p, "nuc"),
    "layer_norm": lambda p, q: (F.layer_norm(p, (3,)) * q).sum(),
    "normalize": lambda p, q: (F.normalize(p, dim=1) * q).sum(),
    "normalize of rows": lambda p, q: (F.normalize(p, dim=0) * q).mean(),
    "topk": lambda p, q: p.topk(2, dim=1).values.sum(),
    "topk of rows": lambda p, q: p.topk(1, dim=0).values.sum(),
    "sort": lambda p, q: (p.sort(0).values * q).sum(),
    "argmax": lambda p, q: p.argmax().float() + p.sum() * 0,
    "argmax of rows": lambda p, q: p.argmax(0).float().sum() + p.sum() * 0,
    "cat": lambda p, q: torch.cat([p, q]).square().mean(),
    "stack": lambda p, q: torch.stack([p, q]).square().mean(),
    "roll": lambda p, q: (p.roll(1, 0) * q).sum(),
    "flip": lambda p, q: (p.flip(0) * q).sum(),
    "tril": lambda p, q: p.tril().square().sum(),
    "diff": lambda p, q: p.diff(dim=0).square().mean(),
    "chunks": lambda p, q: sum(x.square().mean() for x in p.chunk(2)),
    "chunks of columns": lambda p, q: sum(x.square().mean() for x in p.chunk(3, 1)),
    "rows": lambda p, q: p[1:].square().mean() + p[0].sum(),
    "columns": lambda p, q: p[:, 1:].square().mean() + p[:, 0].sum(),
    "diagonal": lambda p, q: p.diagonal().square().mean(),
    "mean of abs": lambda p, q: F.l1_loss(p, torch.zeros_like(p)),
    "group lasso": lambda p, q: p.square().sum(1).add(1e-6).sqrt().sum(),
    "group lasso of columns": lambda p, q: p.square().sum(0).add(1e-6).sqrt().mean(),
    "embedding": lambda p, q: F.embedding(torch.tensor([0, 1, 0]), p).square().mean(),
    "linear": lambda p, q: F.linear(torch.ones(2, 3), p).square().mean(),
    "where": lambda p, q: torch.where(p > 0, p, q).mean(),
    "nan sum": lambda p, q: p.nansum() + p.nanmean(),
    "count": lambda p, q: (p > 0).sum() * p.sum(),
    "count_nonzero": lambda p, q: torch.count_nonzero(p) * p.sum(),
    "dist": lambda p, q: torch.dist(p, q),
    "addcmul": lambda p, q: torch.addcmul(p, p, q).mean(),
    "outer": lambda p, q: torch.outer(p[:, 0], q[:, 1]).mean(),
    "expand": lambda p, q: p.expand(2, *p.shape).mean(),
    "repeat": lambda p, q: p.repeat(2, 1).mean(),
    "histc": lambda p, q: p.detach().histc(3).max() * p.sum(),
    "unfold": lambda p, q: p.unfold(0, 2, 1).square().sum(),
    "index_select": lambda p, q: p.index_select(0, torch.tensor([0, 1])).mean(),
    "gather": lambda p, q: p.gather(0, torch.zeros(1, 3, dtype=torch.long)).sum(),
    "masked": lambda p, q: p.masked_select(p > 0).sum(),
    "renorm": lambda p, q: (p.renorm(2, 0, 0.5) * q).sum(),
}
VIEWS = {
    "chunk": lambda p: p.chunk(2)[0],
    "chunk of columns": lambda p: p.chunk(3, 1)[0],
    "split": lambda p: p.split(1)[-1],
    "tensor_split": lambda p: p.tensor_split(2)[1],
    "unbind": lambda p: p.unbind(0)[-1],
    "unbind of columns": lambda p: p.unbind(1)[0],
    "diagonal": lambda p: p.diagonal(),
    "transposed": lambda p: p.T,
    "transpose": lambda p: p.transpose(0, 1),
    "permute": lambda p: p.permute(1, 0),
    "movedim": lambda p: p.movedim(0, 1),
    "row": lambda p: p[-1],
    "rows": lambda p: p[1:],
    "every other row": lambda p: p[::2],
    "column": lambda p: p[:, 1],
    "columns": lambda p: p[:, 1:],
    "narrow": lambda p: p.narrow(0, 1, 1),
    "narrow of columns": lambda p: p.narrow(1, 1, 1),
    "flat": lambda p: p.view(-1),
    "flatten": lambda p: p.flatten(),
    "unsqueeze": lambda p: p.unsqueeze(0),
    "unsqueeze last": lambda p: p.unsqueeze(-1),
    "expand": lambda p: p.expand(1, *p.shape),
    "unfold": lambda p: p.unfold(0, 2, 1),
    "all": lambda p: p[:],
    "detached": lambda p: p.detach(),
    "data": lambda p: p.data,
    "view as itself": lambda p: p.view_as(p),
    "transposed twice": lambda p: p.T.T,
    "chunk of the transposed": lambda p: p.T.chunk(3)[0],
}


class Pair(nn.Module):
    def __init__(self, rows):
        super().__init__()
        generator = torch.Generator().manual_seed(rows)
        self.p, self.q = (nn.Parameter(torch.randn(rows, 3, generator=generator)) for _ in range(2))

    def forward(self, x):
        return (x + self.p.sum() * 0 + self.q).sum()


# In backward DTensor itself detaches in place, for which it has no rule in torch 2.11.
LACKING = (NotImplementedError,) if torch.__version__ < "2.12" else ()


@pytest.mark.parametrize(
    ("door", "align", "size", "rows"),
    [("function", "row", 2, 5), survey(("wrapper", "element", 3, 2))],
)
@on_processes("size")
def test_losses_and_penalties_between_parameters(group, door, align, size, rows):
    warnings.simplefilter("ignore", UserWarning)  # torch's own words about its losses
    wrong, refused = {}, []
    model, plain = shard(Pair(rows), group, door, align=align), Pair(rows)
    for name, operation in {**LOSSES, **PENALTIES}.items():
        for each in (model, plain):
            each.zero_grad()
        try:
            expected = operation(plain.p, plain.q)
            expected.sum().backward()
        except (RuntimeError, IndexError):
            continue
        try:
            found = operation(model.p, model.q)
            found.sum().backward()
        except (FullshardError, *LACKING):
            refused.append(name)
            continue
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"[:150]
            continue
        pairs = {"value": (whole(found), expected.detach())}
        for key in ("p", "q"):
            ours, theirs = getattr(model, key).grad, getattr(plain, key).grad
            zero = torch.zeros(rows, 3)
            pairs[key] = (zero if ours is None else whole(ours), zero if theirs is None else theirs)
        for what, (ours, theirs) in pairs.items():
            if ours.shape != theirs.shape or not torch.allclose(
                ours, theirs, 1e-4, 1e-5, equal_nan=True
            ):
                wrong[name] = f"{what} {ours.flatten()[:3]} {theirs.flatten()[:3]}"
    assert wrong == {}
    assert align == "element" or len(refused) < (len(LOSSES) + len(PENALTIES)) / 4


@pytest.mark.parametrize(
    ("door", "align", "rows"),
    [("function", "row", 5), survey(("wrapper", "element", 5))],
)
@on_processes(2)
def test_what_is_written_to_views_is_in_the_next_forward(group, door, align, rows):
    wrong, refused = {}, []
    with torch.no_grad():
        for name, view in VIEWS.items():
            for way in ("mul_", "copy_", "zero_"):
                model, plain = shard(Pair(rows), group, door, align=align), Pair(rows)
                model(torch.zeros(rows, 3))
                try:
                    for each in (plain, model):
                        seen = view(each.p)
                        how = {"mul_": 2.0, "copy_": torch.full(seen.shape, 2.0)}
                        getattr(seen, way)(*([how[way]] if way in how else []))
                except FullshardError:
                    refused.append(f"{name} {way}")
                    continue
                except Exception as error:
                    wrong[f"{name} {way}"] = f"{type(error).__name__}: {error}"[:150]
                    continue
                if not torch.allclose(model.p.full_tensor(), plain.p):
                    wrong[f"{name} {way}"] = "lost"
                elif not torch.allclose(
                    whole(model(torch.zeros(rows, 3))), plain(torch.zeros(rows, 3))
                ):
                    wrong[f"{name} {way}"] = "not in forward"
    assert wrong == {}
    assert len(refused) < 2.5 * len(VIEWS)
