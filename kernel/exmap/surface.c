// SPDX-License-Identifier: GPL-2.0
/* Mapping an exmap: its surface, and the vectors of its interfaces. */

#include <linux/mm.h>
#include <linux/mman.h>

#include "core/compat.h"
#include "core/pt_secondary.h"
#include "exmap/exmap.h"
#include "exmap/transfer.h"

/* Pages of the longest surface: 16 TiB. Its tables of level 2 take a 262,144th of it. */
#define MAX_SURFACE	(1ULL << 32)

static vm_fault_t surface_fault(struct vm_fault *vmf)
{
	struct pt_mount *mount = vmf->vma->vm_private_data;
	struct exmap *exmap;
	u64 *leaf, page;
	bool is_huge;

	/* A child's, or one that was to be moved: nothing is mapped there. */
	if (!mount)
		return VM_FAULT_SIGSEGV;
	exmap = container_of(mount, struct exmap, mount);
	page = (vmf->address - mount->start) >> PAGE_SHIFT;
	leaf = pt_tree_leaf(&exmap->tree, page);
	if (leaf && READ_ONCE(*leaf) & _PAGE_PRESENT)
		return pt_mount_refault(mount, vmf);
	/* A part of 2 MiB, perhaps by an entry that this processor did not know yet. */
	if (unlikely(exmap->pool.blocks) && exmap_may_be_huge(exmap, page))
		return pt_mount_refault(mount, vmf);
	if (!exmap->zero_leaf || (vmf->flags & FAULT_FLAG_WRITE))
		return VM_FAULT_SIGSEGV;
	leaf = exmap_make_leaf(exmap, page, &is_huge);
	/* Memory may be missing for good, as the user has a limit: the CPU must not fault again. */
	if (!leaf)
		return is_huge ? VM_FAULT_NOPAGE : VM_FAULT_SIGBUS;
	cmpxchg64(leaf, 0, exmap->zero_leaf);
	pt_mount_leaf_changed(mount, page);
	return pt_mount_refault(mount, vmf);
}

/*
 * Somebody writes to a page that shows zeros. Without this the core would give him the right to:
 * it takes the entry for one that was read-only to be told of the first write.
 */
static vm_fault_t surface_write_to_zeros(struct vm_fault *vmf)
{
	struct pt_mount *mount = vmf->vma->vm_private_data;
	struct exmap *exmap = mount ? container_of(mount, struct exmap, mount) : NULL;
	u64 *leaf;

	if (!exmap)
		return VM_FAULT_SIGSEGV;
	leaf = pt_tree_leaf(&exmap->tree, (vmf->address - mount->start) >> PAGE_SHIFT);
	/* A frame has come there meanwhile, or nothing is there: he tries again. */
	if (!leaf || READ_ONCE(*leaf) != exmap->zero_leaf)
		return VM_FAULT_NOPAGE;
	return VM_FAULT_SIGSEGV;
}

/* Rights stay what they are. */
static int surface_mprotect(struct vm_area_struct *vma, unsigned long start, unsigned long end,
			    unsigned long flags)
{
	return -EACCES;
}

/*
 * For debuggers and /proc/PID/mem, which need neither the page tables nor a page that may be
 * pinned: the frame is held meanwhile, as for a transfer, on surfaces of every kind.
 */
static int surface_access(struct vm_area_struct *vma, unsigned long addr, void *buffer, int length,
			  int write)
{
	struct pt_mount *mount = vma->vm_private_data;
	unsigned int offset = offset_in_page(addr);
	struct exmap *exmap;
	struct page *page;

	if (!mount)
		return -EFAULT;
	exmap = container_of(mount, struct exmap, mount);
	length = min_t(int, length, PAGE_SIZE - offset);
	atomic_inc(&exmap->pool.holders);
	smp_mb__after_atomic(); /* said before we look; see exmap_may_be_pinned() */
	page = transfer_hold(exmap, (addr - mount->start) >> PAGE_SHIFT);
	if (!page && (write || !exmap->zero_leaf))
		length = -EFAULT;
	else if (!page)
		memset(buffer, 0, length);
	else if (write)
		memcpy(page_address(page) + offset, buffer, length);
	else
		memcpy(buffer, page_address(page) + offset, length);
	if (page)
		put_page(page);
	atomic_dec(&exmap->pool.holders);
	return length;
}

/*
 * What the core sees as a mapping whose first writes are to be reported cannot be pinned for long,
 * by io_uring for example. So that is for surfaces that show zeros alone.
 */
static const struct vm_operations_struct surface_operations = {
	.open = pt_mount_vm_open,
	.close = pt_mount_vm_close,
	.may_split = pt_mount_vm_may_split,
	.mremap = pt_mount_vm_mremap,
	.mprotect = surface_mprotect,
	.fault = surface_fault,
	.access = surface_access,
};

static const struct vm_operations_struct surface_with_zeros_operations = {
	.open = pt_mount_vm_open,
	.close = pt_mount_vm_close,
	.may_split = pt_mount_vm_may_split,
	.mremap = pt_mount_vm_mremap,
	.mprotect = surface_mprotect,
	.fault = surface_fault,
	.pfn_mkwrite = surface_write_to_zeros,
	.access = surface_access,
};

static bool is_surface_like(const struct vm_area_struct *vma)
{
	unsigned long needed = VM_SHARED | VM_READ | VM_WRITE;

	return (vma->vm_flags & (needed | VM_EXEC)) == needed;
}

static int make_zeros(struct exmap *exmap)
{
	if (!(exmap->flags & VELLUM_EXMAP_READS_ZEROS))
		return 0;
	exmap->zeros = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
	if (!exmap->zeros)
		return -ENOMEM;
	exmap->zero_leaf = page_to_phys(exmap->zeros) | _PAGE_SPECIAL |
			   (PT_LEAF_FLAGS & ~(u64)(_PAGE_RW | _PAGE_DIRTY));
	return 0;
}

static int first_mapping(struct exmap *exmap, u64 pages)
{
	int error;

	if (pages > MAX_SURFACE)
		return -EINVAL;
	/* Programs for the published interface map the surface first, and expect that. */
	exmap->pinnable = !exmap->interface || (exmap->flags & VELLUM_EXMAP_PINNABLE);
	exmap->leaf_flags = PT_LEAF_FLAGS | (exmap->pinnable ? 0 : _PAGE_SPECIAL);
	if (exmap->flags & VELLUM_EXMAP_TRACKS)
		exmap->leaf_flags &= ~(u64)(_PAGE_ACCESSED | _PAGE_DIRTY);
	error = make_zeros(exmap);
	if (error)
		return error;
	exmap_charge_tables(exmap);
	error = pt_tree_init(&exmap->tree, pages, &exmap->source);
	if (!error)
		exmap_set_prune_mark(exmap);
	return error;
}

static int map_locked(struct exmap *exmap, struct vm_area_struct *vma)
{
	unsigned long flags = VM_DONTEXPAND | VM_DONTDUMP | VM_DONTCOPY | VM_NOHUGEPAGE;
	bool is_first = !exmap->tree.root;
	int error;

	error = is_first ? first_mapping(exmap, vma_pages(vma)) : 0;
	if (!error) {
		flags |= exmap->pinnable ? VM_MIXEDMAP : VM_PFNMAP | VM_IO;
		pt_vma_change_flags(vma, flags, VM_MAYEXEC);
		error = pt_mount_create(&exmap->mount, vma);
	}
	/* Until here all pages were watched. */
	if (!error && !exmap->shows)
		exmap->watched = exmap->mount.tail;
	if (!error)
		vma->vm_ops = exmap->zero_leaf ? &surface_with_zeros_operations :
						 &surface_operations;
	/* With other errors a command may have begun to use the tree: it waits for the next mapping. */
	else if (is_first && (error == -EINVAL || !exmap->tree.root))
		exmap_surface_destroy(exmap);
	return error;
}

int exmap_map_surface(struct exmap *exmap, struct vm_area_struct *vma)
{
	int error;

	if (!is_surface_like(vma))
		return -EACCES;
	/* A virtual machine would go on with frames that are somebody else's. */
	if (!pt_secondary_can_be_told())
		return -EOPNOTSUPP;
	if (mutex_lock_killable(&exmap->setup))
		return -EINTR;
	error = map_locked(exmap, vma);
	mutex_unlock(&exmap->setup);
	return error;
}

static void forget_frame(void *data, u64 page, u64 leaf)
{
	struct exmap *exmap = data;

	if (exmap_has_frame(exmap, leaf))
		frame_pool_forget(&exmap->pool, pt_leaf_pfn(leaf));
}

/* Nothing maps the surface, and nobody has the exmap. */
void exmap_surface_destroy(struct exmap *exmap)
{
	if (exmap->flags & VELLUM_EXMAP_NO_POOL)
		pt_tree_each_leaf(&exmap->tree, forget_frame, exmap);
	exmap_tables_destroy(exmap);
	pt_tree_destroy(&exmap->tree);
	if (exmap->zeros)
		__free_page(exmap->zeros);
	exmap->zeros = NULL;
	exmap->zero_leaf = 0;
}

int exmap_map_vector(struct exmap *exmap, struct vm_area_struct *vma, unsigned long index)
{
	if (!exmap_is_created(exmap) || index >= exmap->interfaces)
		return -ENXIO;
	if (vma->vm_end - vma->vm_start != PAGE_SIZE)
		return -EINVAL;
	if (!(vma->vm_flags & VM_SHARED) || (vma->vm_flags & VM_EXEC))
		return -EACCES;
	pt_vma_change_flags(vma, VM_DONTEXPAND | VM_DONTDUMP | VM_DONTCOPY, VM_MAYEXEC);
	return vm_insert_page(vma, vma->vm_start, virt_to_page(exmap->interface[index].vector));
}
