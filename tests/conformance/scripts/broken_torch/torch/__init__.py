from torch.missing_part import absent
