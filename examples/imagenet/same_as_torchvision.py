"""Are these networks torchvision's? Shares the weights and compares the outputs. Run it where torchvision is installed.

    python examples/imagenet/same_as_torchvision.py
"""

import sys

import torch
from nets import InceptionV3, ResNet50


def compare(name, ours, theirs, size):
    """Load their weights into ours; the largest difference between the outputs, training and evaluating."""
    ours.load_state_dict(theirs.state_dict())  # strict: names and shapes must all agree
    images = torch.rand(4, 3, size, size) * 2 - 1
    worst = 0.0
    for training in (True, False):
        outputs = []
        for net in (ours, theirs):
            net.train(training)
            torch.manual_seed(0)  # the same dropout
            made = net(images)
            outputs.append(torch.cat(list(made), 1) if isinstance(made, tuple) else made)
        worst = max(worst, float((outputs[0] - outputs[1]).abs().max() / outputs[1].abs().max()))
    count = sum(p.numel() for p in ours.parameters())
    print(f"{name}: {count:,} parameters, outputs differ by {worst:.1e} of the largest")
    return worst


def main():
    try:
        from torchvision import models
    except ImportError:
        sys.exit("this compares with torchvision, which is not installed here")
    torch.manual_seed(1)
    inception = models.inception_v3(init_weights=False, transform_input=False)
    worst = max(compare("inception_v3", InceptionV3(), inception, 299),
                compare("resnet50", ResNet50(), models.resnet50(), 224))
    sys.exit(worst > 1e-4)


if __name__ == "__main__":
    main()
