/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Leaves of 2 MiB: an entry of level 2 that is 512 pages in one, in place of their table.
 *
 * The table stays the tree's, kept beside it (a deposit): whoever found it before goes on using it,
 * and finds in it that he cannot. All changes go through it:
 *
 *	put		all its entries are claimed, each from none; then the leaf takes its place
 *	take off	it is back in its place, still claimed; TLBs are flushed; they are none
 *	split		it is back in its place, its entries splitting; TLBs are flushed; they are
 *			leaves of 4 KiB
 *
 * What holds:
 * - a table has claimed entries while it is a deposit, and for a moment before and after. For the
 *   core and the processor such an entry is none; nobody but who has claimed it changes it;
 * - so each change has one winner: who claims all entries puts a leaf, who exchanges the leaf for
 *   the table takes it off or splits it;
 * - a processor that still knows the table's place when a leaf has come there finds entries that
 *   are none, and that fault makes it look again. So nothing is flushed for a leaf that comes;
 * - between a leaf and the 512 that it is split into there is a flush, and nothing is mapped: some
 *   processors do not bear entries of both sizes for the same address. Who accesses a page
 *   meanwhile has a fault, and has it again until the leaves are there;
 * - a leaf is taken away under the lock of the table that it is in, as it is with those of 4 KiB:
 *   the core's fault handler writes under it what it has read before.
 *
 * Who waits for what: to put, nobody waits. Who takes off keeps entries claimed until he flushes,
 * which may be after some more of it; so only who brings pages may wait for claimed entries. A
 * split waits for nothing, and everybody may wait for it.
 */
#ifndef VELLUM_PT_HUGE_H
#define VELLUM_PT_HUGE_H

#include "core/compat.h"
#include "core/pt_mount.h"
#include "core/pt_tree.h"

/* A state of an entry of level 1 that is not present; another one is PT_CLAIMED. */
#define PT_SPLITTING	((u64)(_PAGE_ACCESSED | _PAGE_DIRTY))

/*
 * Such a leaf. Nothing pins it; accessed and dirty as leaves of 4 KiB are, and in the core's own
 * sense too, so that it has nothing to add.
 */
#define PT_HUGE_FLAGS	(PT_LEAF_FLAGS | _PAGE_PSE | _PAGE_SOFT_DIRTY | PT_HUGE_UNPINNABLE)

/* Whether the core knows leaves of 2 MiB when it meets them. */
#define PT_HUGE_IS_POSSIBLE	IS_ENABLED(CONFIG_TRANSPARENT_HUGEPAGE)

/*
 * Puts a leaf on the 512 pages from this one: frames from this number on, both multiples of 512.
 *
 * Errors: EBUSY there is something; EAGAIN somebody else is just putting such a leaf, or taking one
 * off, and may not have flushed; EEXIST there is such a leaf; EINVAL the tree does not have all of
 * these pages; ENOMEM.
 */
int pt_huge_put(struct pt_mount *mount, u64 page, u64 frame);

/*
 * Takes the leaf off; returns its first frame, or 0 if there is none. The caller flushes, and then
 * opens the table's entries; then the frames are free.
 */
u64 pt_huge_take_off(struct pt_mount *mount, u64 page);
void pt_huge_open(struct pt_mount *mount, u64 page);

/*
 * Makes the leaf that the page is in 512 leaves with these flags, and flushes. False: there is
 * none, or somebody else is doing it.
 */
bool pt_huge_split(struct pt_mount *mount, u64 page, u64 flags);

/* For self-checks: leaves of 2 MiB whose table is not as it should be. */
u64 pt_huge_wrong(struct pt_tree *tree);

#endif /* VELLUM_PT_HUGE_H */
