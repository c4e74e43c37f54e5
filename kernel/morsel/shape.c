// SPDX-License-Identifier: GPL-2.0
/* How a Morsel gets its shape, what it is sealed against, and how it ends. */

#include <linux/mm.h>
#include <linux/sched/signal.h>

#include "morsel/morsel.h"

/* A new inode's. */
void morsel_start(struct morsel *morsel)
{
	mutex_init(&morsel->state);
	mutex_init(&morsel->tables);
	morsel->is_shaped = false;
	morsel->length = 0;
	morsel->flags = 0;
	morsel->address = 0;
	morsel->seals = 0;
	morsel->is_revoked = false;
	morsel->writers = 0;
	memset(&morsel->tree, 0, sizeof(morsel->tree));
	morsel->reader = NULL;
	pt_mounts_init(&morsel->mounts);
	atomic64_set(&morsel->pages, 0);
}

static bool is_right(const struct vellum_morsel_create *create)
{
	u64 extent;

	if (create->order > VELLUM_MORSEL_MAX_ORDER || create->flags & ~(u64)MORSEL_FLAGS)
		return false;
	extent = VELLUM_MORSEL_EXTENT(create->order);
	if (!create->length || create->length > extent)
		return false;
	if ((create->flags & VELLUM_MORSEL_HUGE) &&
	    (create->order < 2 || (create->flags & VELLUM_MORSEL_PINNABLE)))
		return false;
	return IS_ALIGNED(create->address, extent) && create->address <= TASK_SIZE_MAX - extent;
}

static int shape_locked(struct morsel *morsel, const struct vellum_morsel_create *create)
{
	int error;

	if (morsel->is_revoked)
		return -EIO;
	if (morsel->is_shaped)
		return -EBUSY;
	if (!morsel_charge(morsel, 1))
		return -ENOSPC;
	/* A page on its own has a table, too, but nobody mounts it. */
	error = pt_tree_init_sparse(&morsel->tree, create->order ?: 1);
	if (error) {
		morsel_uncharge(morsel, 1);
		return error;
	}
	morsel->order = create->order;
	morsel->length = create->length;
	morsel->flags = create->flags;
	morsel->address = create->address;
	morsel->leaf_flags = PT_LEAF_FLAGS;
	if (!(create->flags & VELLUM_MORSEL_PINNABLE))
		morsel->leaf_flags |= _PAGE_SPECIAL;
	i_size_write(&morsel->inode, create->length);
	/* From here on it is used. */
	smp_store_release(&morsel->is_shaped, true);
	return 0;
}

int morsel_shape(struct morsel *morsel, const struct vellum_morsel_create *create)
{
	int error;

	if (!is_right(create))
		return -EINVAL;
	if (mutex_lock_killable(&morsel->state))
		return -EINTR;
	error = shape_locked(morsel, create);
	mutex_unlock(&morsel->state);
	return error;
}

int morsel_shape_by_length(struct morsel *morsel, u64 length)
{
	struct vellum_morsel_create create = { .length = length };

	while (create.order < VELLUM_MORSEL_MAX_ORDER && length > VELLUM_MORSEL_EXTENT(create.order))
		create.order++;
	return morsel_shape(morsel, &create);
}

int morsel_seal(struct morsel *morsel, u64 seals)
{
	int error = 0;

	if (seals & ~(u64)(VELLUM_MORSEL_SEAL_CONTENT | VELLUM_MORSEL_SEAL_POPULATION))
		return -EINVAL;
	if (mutex_lock_killable(&morsel->state))
		return -EINTR;
	if (morsel->is_revoked)
		error = -EIO;
	else if ((seals & VELLUM_MORSEL_SEAL_CONTENT) && morsel->writers)
		error = -EBUSY;
	else
		WRITE_ONCE(morsel->seals, morsel->seals | seals);
	mutex_unlock(&morsel->state);
	return error;
}

int morsel_begin_writing(struct morsel *morsel)
{
	int error = 0;

	if (mutex_lock_killable(&morsel->state))
		return -EINTR;
	if (morsel->is_revoked)
		error = -EIO;
	else if (morsel->seals & VELLUM_MORSEL_SEAL_CONTENT)
		error = -EPERM;
	else
		morsel->writers++;
	mutex_unlock(&morsel->state);
	return error;
}

void morsel_end_writing(struct morsel *morsel)
{
	mutex_lock(&morsel->state);
	morsel->writers--;
	mutex_unlock(&morsel->state);
}

int morsel_revoke(struct morsel *morsel)
{
	mutex_lock(&morsel->state);
	WRITE_ONCE(morsel->is_revoked, true);
	mutex_unlock(&morsel->state);
	/* Pairs with the one after a page was put: it goes here, or who has put it takes it off. */
	smp_mb();
	if (!morsel_is_shaped(morsel))
		return 0;
	pt_mounts_detach(&morsel->mounts);
	return morsel_punch_pages(morsel, 0, morsel_page_count(morsel));
}

static void free_page_of(void *data, u64 page, u64 leaf)
{
	put_page(pfn_to_page(pt_leaf_pfn(leaf)));
}

/* Nobody has it: no name, no descriptor, no mapping. */
void morsel_end(struct morsel *morsel)
{
	u64 taken;

	if (!morsel_is_shaped(morsel))
		return;
	WARN_ON_ONCE(morsel->mounts.count || morsel->writers);
	taken = atomic64_read(&morsel->pages) + atomic_long_read(&morsel->tree.tables);
	morsel_destroy_reader(morsel);
	pt_tree_each_leaf(&morsel->tree, free_page_of, NULL);
	pt_tree_destroy(&morsel->tree);
	morsel_uncharge(morsel, taken);
}
