/* SPDX-License-Identifier: GPL-2.0 */
/* The pieces of a mount: by which entries the tree goes into the process, and where. */
#ifndef VELLUM_PT_PIECES_H
#define VELLUM_PT_PIECES_H

#include "core/pt_mount.h"

/* Finds the pieces, and the tail, of a mount whose place is known; or ENOMEM. */
int pt_pieces_find(struct pt_mount *mount);

/* To what the address of so many bytes must be aligned: the largest table that fits and has a slot. */
unsigned long pt_pieces_alignment(unsigned long len);

/* A place for a mapping, aligned so that few entries mount it. */
unsigned long pt_pieces_area(struct file *file, unsigned long addr, unsigned long len,
			     unsigned long pgoff, unsigned long flags);

#endif /* VELLUM_PT_PIECES_H */
